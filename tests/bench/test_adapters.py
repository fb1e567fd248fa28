import pytest
import torch

import fake_peer
from bench import adapters, worker
from bench.adapters import Entry, Peer
from bench.cases import OPERATIONS, Shape, draw

SMALL = Shape("small", 2, 12, 2, 2, 8, 16)
STEP = Shape("step", 3, 1, 2, 4, 8, 16)
FAKE = Peer(
    "fake_peer",
    {
        "delta": Entry("fake_peer", "key_first", half=("beta",)),
        "gdn": Entry(
            "fake_peer",
            "packed",
            linear=("log_decay",),
            state_key_first=False,
            packed=True,
            longest="longest",
        ),
        "gated_product2": Entry(
            "fake_peer",
            "key_first",
            half=("beta",),
            options={"steps": 2, "output_final_state": True},
        ),
        "decode": Entry(
            "fake_peer", "key_first", names={"log_decay": "g", "state": "initial_state"}
        ),
    },
)


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setitem(adapters.PEERS, "fake", FAKE)
    fake_peer.CALLS.clear()


def both_ways(peer, name, shape):
    """o and state through the peer's conventions, and from the definition in float64."""
    inputs = draw(OPERATIONS[name], shape, device="cpu")
    exact = worker.reference(OPERATIONS[name], worker.widened(inputs))
    return worker.through(adapters.side(peer, name, "torch"), inputs), exact, inputs


@pytest.mark.parametrize("peer", ["fake", "deltarule"])
@pytest.mark.parametrize("name", FAKE.entries)
def test_a_peers_conventions_are_met(peer, name):
    """o to the rounding of bfloat16, the state, which stays in float32, to its own."""
    (o, state), (exact_o, exact_state), _ = both_ways(
        peer, name, STEP if name == "decode" else SMALL
    )
    assert o.shape == exact_o.shape
    assert (o.double() - exact_o).norm() <= 2**-8 * exact_o.norm()
    assert state.shape == exact_state.shape
    assert (state.double() - exact_state).norm() <= 1e-5 * exact_state.norm()


@pytest.mark.parametrize("name", [x for x in OPERATIONS if x not in ("softmax", "decode")])
def test_our_operators_behind_every_operation(name):
    (o, _), (exact, _), _ = both_ways("deltarule", name, SMALL)
    assert (o.double() - exact).norm() <= 2**-8 * exact.norm()


def test_steps_in_place_of_decays(monkeypatch):
    """As of Mamba-2's authors, whose entry it has but for the module; two inputs are rounded."""
    entry = adapters.PEERS["mamba_ssm"].entries["simple_gla"]
    options = {"chunk_size": entry.options["chunk_size"]}
    entry = entry._replace(module="fake_peer", function="stepping", options=options)
    monkeypatch.setitem(adapters.PEERS, "fake", Peer("fake_peer", {"simple_gla": entry}))
    (o, state), exact, _ = both_ways("fake", "simple_gla", SMALL)
    for found, expected in zip((o, state), exact, strict=True):
        assert (found.double() - expected).norm() <= 2**-7 * expected.norm()


def test_a_part_of_a_package_that_cannot_be_imported(tmp_path, monkeypatch):
    (tmp_path / "broken_peer").mkdir()
    (tmp_path / "broken_peer" / "__init__.py").write_text("import no_such_extension")
    (tmp_path / "broken_peer" / "part.py").write_text("def run(**arguments): return 7")
    monkeypatch.syspath_prepend(tmp_path)
    peer = Peer("broken_peer", {"delta": Entry("broken_peer.part", "run")}, parts=True)
    monkeypatch.setitem(adapters.PEERS, "broken", peer)
    assert adapters.installed("broken")
    assert adapters.side("broken", "delta", "auto").call({}) == 7


def test_softmax_attention_is_pytorchs():
    (o, state), (exact, _), _ = both_ways("torch", "softmax", SMALL)
    assert (o.double() - exact).norm() <= 2**-7 * exact.norm()
    assert state is None


def test_inputs_change_dtype_before_the_clock_starts():
    both_ways("fake", "delta", SMALL)
    assert fake_peer.CALLS[-1]["beta"] is torch.bfloat16


@pytest.mark.parametrize("peer", ["fake", "deltarule"])
def test_a_step_leaves_the_drawn_state_alone(peer):
    *_, inputs = both_ways(peer, "decode", STEP)
    again = draw(OPERATIONS["decode"], STEP, device="cpu")
    assert torch.equal(inputs["state"], again["state"])


def test_rounding_to_bfloat16_changes_no_input():
    for name, operation in OPERATIONS.items():
        inputs = draw(operation, STEP if name == "decode" else SMALL, device="cpu")
        for gate in {"beta", "log_decay"} & set(inputs):
            assert inputs[gate].dtype is torch.float32
            assert torch.equal(inputs[gate], inputs[gate].bfloat16().float())


def test_gradients_pass_through_the_conversion():
    inputs = draw(OPERATIONS["gdn"], SMALL, device="cpu")
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    o, _ = worker.through(adapters.side("fake", "gdn", "auto"), leaves)
    gradients = torch.autograd.grad(o.sum(), list(leaves.values()))
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_flas_own_kernels_are_asked_for():
    """FLA calls FlashQLA where that is installed, unless it is told not to."""
    for name in ("fla", "fla-triton"):
        assert adapters.PEERS[name].environment["FLA_FLASH_QLA"] == "0"


def test_installed():
    assert adapters.installed("deltarule")
    assert adapters.installed("torch")
    assert adapters.installed("fake")
    absent = adapters.PEERS["flash_qla"]._replace(package="no_such_package")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(adapters.PEERS, "absent", absent)
        assert not adapters.installed("absent")
