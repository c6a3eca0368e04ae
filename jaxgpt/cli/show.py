# SPDX-License-Identifier: Apache-2.0
"""What the train command adds to the loop: samples, pictures and loggers, as `ShowConfig` says."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from jaxgpt.cli.command import note
from jaxgpt.cli.reference import Comparing, check_recipe, draw_compared, find_reference
from jaxgpt.cli.report import write_report
from jaxgpt.cli.train import stored_run
from jaxgpt.config import RunConfig
from jaxgpt.configlib import short_name, to_data
from jaxgpt.shapes import Params
from jaxgpt.study.loggers import TensorBoard, WandB
from jaxgpt.study.runs import Sampler, draw_attention, draw_losses, unfailing
from jaxgpt.train.runfolder import RunFolder


@contextlib.contextmanager
def shown(folder: RunFolder, run: RunConfig) -> Iterator[dict[str, Any]]:
    """Keyword arguments for `jaxgpt.train.loop.fit`; loggers are closed in the end.

    Args:
      folder: The run's folder, locked.
      run: Its configuration.

    Raises:
      ConfigError: A logger's package is missing, or does not start.
    """
    show, hooks, endings = run.show, [], []
    if show.sample_tokens:
        sampler = Sampler(folder, run.model, prompt=show.prompt, tokens=show.sample_tokens)
        hooks.append(unfailing("sample", sampler))
    if show.pictures:
        endings = [
            unfailing("loss.png", lambda params: f"drew {draw_losses(folder)}"),
            unfailing("attention.png", _drawing(folder, run)),
        ]
    if show.report:
        endings.append(unfailing("report.html", _reporting(folder, run)))
    listeners: list[Any] = []
    strict: list[Any] = []
    if show.compare is not None:
        reference = find_reference(show.compare)
        check_recipe(reference, stored_run(folder) or run)
        strict.append(Comparing(reference, folder, note))
        endings.append(unfailing("reference.png", lambda _: draw_compared(folder, reference)))
    if show.tensorboard:
        listeners.append(TensorBoard(folder.path))
    if show.wandb is not None:
        listeners.append(WandB(folder.path, show.wandb, to_data(run, short_name)))
    try:
        yield {
            "hooks": hooks,
            "endings": endings,
            "listeners": [*strict, *map(_while_it_works, listeners)],
        }
    finally:
        for each in listeners:
            try:
                each.close()
            except Exception as error:
                note(f"warning: {type(each).__name__} did not end well: {error}")


def _drawing(folder: RunFolder, run: RunConfig) -> Callable[[Params], str]:
    return lambda params: f"drew {draw_attention(folder, run.model, params, data=run.data)}"


def _reporting(folder: RunFolder, run: RunConfig) -> Callable[[Params], str]:
    return lambda params: f"wrote {write_report(folder, run, lambda _: params)}"


def _while_it_works(listener: Any) -> Callable[[dict[str, Any]], None]:
    """The listener up to its first failure, which is a warning: the run goes on without it."""
    working = True

    def listen(record: dict[str, Any]) -> None:
        nonlocal working
        if working:
            try:
                listener(record)
            except Exception as error:
                working = False
                note(f"warning: {type(listener).__name__} gets no more records: {error}")

    return listen
