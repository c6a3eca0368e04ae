# SPDX-License-Identifier: Apache-2.0
import jax
import jax.numpy as jnp
import pytest

from jaxgpt.errors import ConfigError
from jaxgpt.train.profiling import Profile, profiled_steps


@pytest.mark.parametrize("text", ["", "10", "10:", ":15", "15:10", "0:5", "a:b", "1:2:3", "-1:3"])
def test_what_is_no_range_is_refused(text):
    with pytest.raises(ConfigError, match=r"is no range of steps.*fix: --profile=10:15"):
        profiled_steps(text)


def run(profile, start, end):
    """As the loop does it, a step being a product; the lines that are said."""
    said = []
    with profile:
        for step in range(start, end):
            if profile.begins(step):
                profile.begin(step)
            jnp.ones((4, 4)).sum().block_until_ready()
            if profile.ends(step + 1):
                said.append(profile.end(step + 1))
        said.append(profile.end(end))
    return [line for line in said if line]


def test_a_trace_of_some_steps(tmp_path):
    assert profiled_steps("3:4") == (3, 4)
    profile = Profile((3, 4), tmp_path)
    assert profile.edges() == (2, 4)
    (line,) = run(profile, 0, 6)
    assert profile.edges() == ()
    (trace,) = tmp_path.glob("profile/plugins/profile/*/*.trace.json.gz")
    assert line.startswith(f"profile of steps 3 to 4: open {trace} at https://ui.perfetto.dev")


def test_a_run_that_goes_on_inside_of_the_range_traces_the_rest(tmp_path):
    (line,) = run(Profile((3, 9), tmp_path), 5, 7)
    assert line.startswith("profile of steps 6 to 7: ")


@pytest.mark.parametrize(("start", "end"), [(0, 2), (4, 6)])
def test_steps_that_never_come_are_said(tmp_path, start, end):
    (line,) = run(Profile((3, 4), tmp_path), start, end)
    assert line == f"no profile: the run ended at step {end}, and --profile=3:4 had not come"
    assert not (tmp_path / "profile").exists()


def test_nothing_is_left_running(tmp_path):
    with pytest.raises(RuntimeError, match="mine"), Profile((1, 4), tmp_path) as profile:
        profile.begin(0)
        raise RuntimeError("mine")
    with jax.profiler.trace(str(tmp_path / "other")):  # raises where one runs
        pass
    assert run(Profile(None, tmp_path), 0, 3) == []
