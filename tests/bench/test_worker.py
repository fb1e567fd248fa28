import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import fake_peer
from bench import adapters, worker
from bench.adapters import Entry, Peer
from bench.model import build_fla
from bench.worker import Setting
from deltarule.models import ModelConfig

OURS = Setting("deltarule", "torch", "cpu", 2)
FAKE = OURS._replace(peer="fake")
SHAPE = ["small", 1, 12, 2, 2, 8, 16]
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "mlp_size": 48}
GRADIENTS = {"grad q", "grad k", "grad v", "grad beta"}


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    entries = {
        "delta": Entry("fake_peer", "refuses"),
        "gdn": Entry("fake_peer", "forward_only"),
        "simple_gla": Entry("fake_peer", "refuses", no_backward="it has no backward pass"),
        "product2": Entry(
            "fake_peer", "key_first", options={"output_final_state": True, "steps": 2},
            no_backward="it has no backward pass",
        ),
    }  # fmt: skip
    monkeypatch.setitem(adapters.PEERS, "fake", Peer("fake_peer", entries))


def attempt(setting, kind, operation, backward=True):
    case = {"kind": kind, "operation": operation, "shape": SHAPE, "backward": backward}
    return worker.attempt(case, setting)


@pytest.mark.parametrize(("backward", "name"), [(False, "forward"), (True, "forward_backward")])
def test_a_pass_is_timed_and_the_graph_needs_a_gpu(backward, name):
    row = attempt(OURS, "time", "gdn", backward=backward)
    assert row.keys() == {name}
    assert row[name].keys() == {"first_s", "extra_MiB", "eager_ms"}
    assert row[name]["first_s"] > 0
    assert row[name]["eager_ms"] > 0
    assert row[name]["extra_MiB"] is None


def test_errors_are_those_of_the_dtype():
    gated = attempt(OURS, "error", "gdn")["errors"]
    assert gated.keys() == {"o", "state", "grad log_decay", *GRADIENTS}
    errors = attempt(OURS, "error", "delta")["errors"]
    assert errors.keys() == {"o", "state", *GRADIENTS}
    assert max(errors.values()) < 2**-8
    assert attempt(OURS, "error", "decode")["errors"].keys() == {"o", "state"}


def test_a_wrong_result_is_seen(monkeypatch):
    def halved(**arguments):
        o, state = fake_peer.key_first(**arguments)
        return o / 2, state

    monkeypatch.setattr(fake_peer, "forward_only", halved)
    assert attempt(FAKE, "error", "gdn")["errors"]["o"] == pytest.approx(0.5, abs=0.01)


def test_a_refusal_is_reported_by_its_first_line():
    refused = "RuntimeError: not on this machine"
    assert attempt(FAKE, "time", "delta", backward=False) == {"forward": {"error": refused}}
    assert attempt(FAKE, "time", "delta") == {"error": refused}
    assert attempt(FAKE, "error", "delta") == {"error": refused}
    assert attempt(FAKE, "overhead", "delta") == {"error": refused}


def test_a_refused_backward_pass_leaves_the_forward_pass():
    refused = "RuntimeError: the backward pass is wrong on this version"
    assert attempt(FAKE, "time", "gdn", backward=False)["forward"]["eager_ms"] > 0
    assert attempt(FAKE, "time", "gdn") == {"forward_backward": {"error": refused}}
    row = attempt(FAKE, "error", "gdn")
    assert row["errors"].keys() == {"o", "state"}
    assert row["backward_error"] == refused


def test_a_peer_without_backward_is_timed_forward_only():
    assert attempt(FAKE, "time", "product2", backward=False)["forward"]["eager_ms"] > 0
    without = {"forward_backward": {"error": "it has no backward pass"}}
    assert attempt(FAKE, "time", "product2") == without
    assert attempt(FAKE, "error", "product2")["errors"].keys() == {"o", "state"}


def test_overhead_and_cold_start():
    row = attempt(OURS, "overhead", "gdn", backward=False)
    assert min(row[f"host_{name}us"] for name in ("", "both_", "one_thread_")) > 0
    assert attempt(OURS, "cold", "gdn")["seconds"] > 0


def test_training_steps_of_a_model():
    case = {"kind": "model", "batch": 1, "tokens": 16, "sizes": SIZES, "steps": 2, "warm_up": 1}
    row = worker.attempt(case, OURS)
    assert row["tokens_per_s"] == pytest.approx(16 / row["step_s"])
    assert row["peak_GiB"] is None
    # ln 64, for a model that knows nothing yet.
    assert row["loss"] == pytest.approx(4.16, abs=1.5)
    embedding, mixer_and_mlp = 2 * 64 * 32, 2 * (4 * 32 * 32 + 3 * 32 * 48)
    assert row["parameters"] >= embedding + mixer_and_mlp


@pytest.mark.parametrize("whole_logits", [True, False])
def test_a_peer_takes_our_sizes_and_one_fused_loss_or_the_other(whole_logits, monkeypatch):
    seen = []

    def built(config):
        seen.append(vars(config))
        return nn.Linear(1, 1)

    models = ModuleType("fla.models")
    models.DeltaNetConfig, models.DeltaNetForCausalLM = SimpleNamespace, built
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.models", models)
    ours = ModelConfig(layer_types="deltanet", tie_embeddings=False, **SIZES)
    model, _ = build_fla("DeltaNet", ours, {"use_gate": False}, "cpu", whole_logits=whole_logits)
    assert next(model.parameters()).dtype == torch.bfloat16
    (told,) = seen
    assert told == {
        "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48,
        "tie_word_embeddings": False, "use_gate": False, "fuse_cross_entropy": whole_logits,
        "fuse_linear_cross_entropy": not whole_logits,
    }  # fmt: skip
