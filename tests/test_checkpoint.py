# SPDX-License-Identifier: Apache-2.0
"""Saving and reading back; faults are in test_restore.py and test_storage.py."""

import json
import math
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpointing import ONE, WANTED, abstract, fill, names, run_python, state

from jaxgpt.errors import CheckpointError, ConfigError, DivergedError
from jaxgpt.train.checkpoint import Checkpoints
from jaxgpt.train.digest import digest


def test_round_trip_is_bitwise_and_keeps_the_structure(tmp_path):
    params, rest = state(7)
    with Checkpoints(tmp_path / "a" / "b") as checkpoints:
        assert checkpoints.restore(*WANTED) is None
        checkpoints.save(12, params, rest, val_loss=1.25, extra={"tokens": 2**40, "x": [0.1, None]})
    with Checkpoints(tmp_path / "a" / "b", read_only=True) as checkpoints:
        found = checkpoints.restore(*WANTED)
    assert (found.step, found.val_loss) == (12, 1.25)
    assert found.extra == {"tokens": 2**40, "x": [0.1, None]}
    assert jax.tree.structure(found.rest) == jax.tree.structure(rest)
    assert digest([found.params, found.rest]) == digest([params, rest])
    assert isinstance(found.rest["opt_state"][0], optax.ScaleByAdamState)


def test_meta_is_plain_json_and_orbax_reads_the_layout(tmp_path):
    import orbax.checkpoint as ocp

    fill(tmp_path, steps=[3])
    meta = json.loads((tmp_path / "step_00000003" / "meta" / "metadata").read_text())
    assert meta["format_version"] == 1 and meta["step"] == 3
    assert meta["digest"]["params/embed/kernel"].startswith("float32[32,16]:")
    options = ocp.CheckpointManagerOptions(step_prefix="step", step_format_fixed_length=8)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        items = ocp.args.Composite(params=ocp.args.StandardRestore(WANTED[0]))
        found = manager.restore(3, args=items)["params"]
    assert digest(found) == digest(state(3)[0])


def test_parameters_alone(tmp_path):
    fill(tmp_path, steps=[3])
    for item in (tmp_path / "step_00000003" / "rest").iterdir():  # nobody reads the moments
        item.unlink() if item.is_file() else shutil.rmtree(item)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        found = checkpoints.restore_params(WANTED[0])
    assert digest(found.params) == digest(state(3)[0]) and found.rest is None


def test_the_state_may_be_donated_right_after_save(tmp_path):
    overwrite = jax.jit(lambda t: jax.tree.map(lambda x: x * 0 - 1, t), donate_argnums=0)
    kept = {}
    with Checkpoints(tmp_path, keep=8) as checkpoints:
        for step in range(1, 9):
            params = {"w": jax.random.normal(jax.random.key(step), (256, 64))}
            kept[step] = digest(params)
            checkpoints.save(step, params, {"step": jnp.int32(step)})
            jax.block_until_ready(overwrite(params))
            if not params["w"].is_deleted():  # XLA:CPU copies what somebody still reads
                params["w"].delete()
        like = abstract({"w": jnp.zeros((256, 64))})
        for step in kept:
            assert digest(checkpoints.restore_params(like, step=step).params) == kept[step]


def test_saved_is_reported_after_the_commit_only(tmp_path):
    seen = []

    def saved(step):
        assert (tmp_path / f"step_{step:08d}" / "commit_success.txt").exists()
        seen.append(step)

    with Checkpoints(tmp_path, on_saved=saved) as checkpoints:
        checkpoints.poll()
        checkpoints.save(1, *state(1))
        assert seen == []
        deadline = time.monotonic() + 20
        while not seen and time.monotonic() < deadline:
            checkpoints.poll()
        assert seen == [1]
        checkpoints.save(2, *state(2))
        checkpoints.save(3, *state(3))
        assert seen == [1, 2]
    assert seen == [1, 2, 3]


def test_an_error_in_the_loop_keeps_the_save_under_way(tmp_path):
    with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, *state(1))
        raise ZeroDivisionError
    assert Checkpoints(tmp_path, read_only=True).restore(*WANTED).step == 1


def test_the_same_step_twice(tmp_path):
    seen = []
    with Checkpoints(tmp_path, on_saved=seen.append) as checkpoints:
        checkpoints.save(5, *state(5))
        checkpoints.save(5, *state(5))
        checkpoints.wait()
        before = (tmp_path / "step_00000005").stat().st_mtime_ns
        checkpoints.save(5, *state(5), val_loss=1.0)
        with pytest.raises(CheckpointError, match="other values"):
            checkpoints.save(5, *state(6))
    assert seen == [5] and (tmp_path / "step_00000005").stat().st_mtime_ns == before


def test_older_steps_can_be_saved_after_newer_ones(tmp_path):
    fill(tmp_path, steps=[10, 20], keep=3)
    fill(tmp_path, steps=[15], keep=3)
    assert Checkpoints(tmp_path).steps() == [10, 15, 20]


@pytest.mark.parametrize("where", ["params", "rest"])
def test_what_is_not_finite_is_never_saved(tmp_path, where):
    params, rest = state()
    if where == "params":
        params["block_0"]["scale"] = params["block_0"]["scale"].at[3].set(jnp.nan)
    else:
        rest["extra"] = {"ema": jnp.array(jnp.inf)}
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(DivergedError, match=where) as error:
            checkpoints.save(3, params, rest)
        assert error.value.exit_code == 3
    assert names(tmp_path) == []


def test_newest_and_best_stay_also_after_a_restart(tmp_path):
    losses = {1: 3.0, 2: 1.5, 3: math.nan, 4: 1.9, 5: None, 6: 1.7, 7: math.inf}
    for step, loss in losses.items():
        with Checkpoints(tmp_path, keep=2) as checkpoints:
            checkpoints.save(step, *state(step), val_loss=loss)
            checkpoints.wait()
            best = None if step == 1 else 2
            assert checkpoints.best_step() == (best or 1)
            expected = {step, step - 1, best or 1} - {0}
            assert checkpoints.steps() == sorted(expected)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.steps() == [2, 6, 7]
        assert [checkpoints.val_loss(s) for s in (2, 6, 7)] == [1.5, 1.7, None]
    assert names(tmp_path) == [f"step_{s:08d}" for s in (2, 6, 7)]


def test_without_losses_the_newest_stay(tmp_path):
    fill(tmp_path, steps=range(1, 6), keep=1)
    checkpoints = Checkpoints(tmp_path, read_only=True)
    assert checkpoints.steps() == [5] and checkpoints.best_step() is None


def test_another_model_is_refused_before_anything_moves(tmp_path):
    fill(tmp_path)
    before = names(tmp_path)
    params, rest = WANTED
    wider = {**params, "embed": {"kernel": jax.ShapeDtypeStruct((32, 8), "float32", sharding=ONE)}}
    half = {**params, "embed": {"kernel": jax.ShapeDtypeStruct((32, 16), "bfloat16", sharding=ONE)}}
    with Checkpoints(tmp_path) as checkpoints:
        for other, text in [
            ((wider, rest), r"embed/kernel is float32\[32,16\] there, float32\[32,8\] here"),
            ((half, rest), r"float32\[32,16\] there, bfloat16\[32,16\] here"),
            (({**params, "more": params["embed"]}, rest), "more/kernel is absent there"),
            ((params, {"step": rest["step"]}), "rest/key is .* there, absent here, .* and 3 more"),
        ]:
            with pytest.raises(ConfigError, match=text) as error:
                checkpoints.restore(*other)
            assert error.value.exit_code == 2
        assert checkpoints.restore(*WANTED).step == 30
    assert names(tmp_path) == before


def test_abstract_leaves_need_a_sharding(tmp_path):
    fill(tmp_path, steps=[1])
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="no sharding"):
        checkpoints.restore_params(jax.eval_shape(lambda: state()[0]))


def test_reading_only_creates_nothing(tmp_path):
    with pytest.raises(CheckpointError) as error:
        Checkpoints(tmp_path / "absent", read_only=True)
    assert error.value.exit_code == 4 and not (tmp_path / "absent").exists()
    fill(tmp_path / "c", steps=[1])
    with Checkpoints(tmp_path / "c", read_only=True) as checkpoints:
        with pytest.raises(ValueError, match="reading only"):
            checkpoints.save(2, *state(2))
        with pytest.raises(CheckpointError, match=r"no step 9, only \[1\]"):
            checkpoints.restore(*WANTED, step=9)


def test_no_checkpoint_yet(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.steps() == [] and checkpoints.best_step() is None
        with pytest.raises(CheckpointError, match="no checkpoint yet"):
            checkpoints.restore_params(WANTED[0])


def test_relative_directories_are_resolved_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with Checkpoints(Path("rün 1/checkpoints")) as checkpoints:
        monkeypatch.chdir("elsewhere")
        checkpoints.save(1, *state(1))
    assert names(tmp_path / "rün 1" / "checkpoints") == ["step_00000001"]


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ConfigError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)


def test_other_shardings_on_eight_devices(tmp_path):
    fill(tmp_path, steps=[4])
    code, _, err = run_python(
        f"""
        import jax, jax.numpy as jnp
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from jaxgpt.train.checkpoint import Checkpoints
        mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        def s(shape, dtype, *spec):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))
        like = {{"embed": {{"kernel": s((32, 16), "float32", "a", "b")}},
                "block_0": {{"scale": s((16,), "bfloat16", ("a", "b"))}}}}
        with Checkpoints({str(tmp_path)!r}) as c:
            found = c.restore_params(like)
            assert found.params["embed"]["kernel"].sharding.spec == P("a", "b")
            c.save(5, found.params, {{"step": jnp.int32(5)}})
        """,
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
    assert code == 0, err
    found = Checkpoints(tmp_path, read_only=True).restore_params(WANTED[0])
    assert found.step == 5 and digest(found.params) == digest(state(4)[0])
    assert np.asarray(found.params["embed"]["kernel"]).shape == (32, 16)
