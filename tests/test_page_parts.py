# SPDX-License-Identifier: Apache-2.0
import dataclasses

from runpages import shown, small
from test_page import Reader

from jaxgpt.model import ModelConfig
from jaxgpt.study import page_parts
from jaxgpt.study.page import joined


def text(parts):
    return "|".join(Reader(joined(parts)).text)


def test_the_lead_says_size_state_and_loss():
    assert text(page_parts.lead(shown())) == (
        "A model of 4,048 parameters, trained for all of its 400 steps on 25,600 tokens; "
        "validation loss 1.6458 nats per token."
    )
    half = shown(records=shown().records[: len(shown().records) // 2])
    said = text(page_parts.lead(half))
    assert "trained for 200 of 400 steps" in said and "the same command goes on" in said
    empty = text(page_parts.lead(shown(records=[], model=small().model)))
    assert empty.startswith("A model, trained for 0 of 400 steps on 0 tokens.|")


def test_parameters_by_box():
    said = text(page_parts.about(shown(), [("closest preset", "tiny <1>")]))
    assert said.startswith("closest preset|tiny <1>|layers|1|width|16|")
    assert "|tokens trained|25,600|" in said and "|time|1m40s|" in said
    assert "|embed|480|11.9%|" in said and said.endswith("|all|4048")
    begun = text(page_parts.about(shown(model=small().model, records=[]), []))
    assert "no tokenizer yet" in begun and "|time|0s" in begun


def test_curves_say_in_words_what_they_show():
    losses, norms = page_parts.curves(shown())
    alt = dict(Reader(losses).attributes)["alt"]
    assert "training loss from 3.762 at step 10 to 1.546 at step 400" in alt
    assert "validation loss from 2.420 at step 100 to 1.646 at step 400" in alt
    assert "gradient norm" in norms
    assert text(page_parts.curves(shown(records=[]))) == "No curves: there is no loss to draw yet."


def test_speed_memory_and_starts():
    said = text(page_parts.speed(shown()))
    assert (
        "|ms a step, at the end|45.714|" in said and "the peak of the devices is not known" in said
    )
    assert "|of that compiling (s)|10|4.5|2.5|210|4.5|2.5|" in said
    fast = [{"step": 1, "tokens_per_s": 5.0, "mfu_full": 0.5}]
    assert "share of the devices' peak (MFU), all keys|0.5|" in text(
        page_parts.speed(shown(records=fast))
    )
    assert text(page_parts.speed(shown(records=[]))) == "No speed: no step is on record."
    memory = text(page_parts.memory(shown()))
    assert "|parameters|22.5 kB|optimizer|" in memory and "the run records none" in memory
    measured = [{"step": 1, "peak_device_bytes": 3e9}, {"step": 2, "peak_device_bytes": 2e9}]
    assert "|peak device|3 GB" in text(page_parts.memory(shown(records=measured)))
    train = dataclasses.replace(small().train, ema_decay=0.9)
    assert "|moving average|22.5 kB" in text(page_parts.memory(shown(train=train)))


def test_events():
    said = text(page_parts.health(shown()))
    assert "not finite|1|jumps of the loss on record|1|" in said
    assert "|100|skipped|not finite|not finite|300|jump|1.6245|1.03" in said
    many = [{"step": i, "spike": True, "loss_nats": 1.0, "grad_norm": 1.0} for i in range(60)]
    assert "The last 50 of 60" in text(page_parts.health(shown(records=many)))
    assert text(page_parts.health(shown(records=[]))) == "No events: no step is on record."


def test_models_of_any_size_are_counted():
    run = shown(model=ModelConfig(n_layers=2, d_model=122_880), records=[])
    assert "A model of 368,692,715,520 parameters" in text(page_parts.lead(run))
    assert "|parameters|1.47 TB|" in text(page_parts.memory(run))
