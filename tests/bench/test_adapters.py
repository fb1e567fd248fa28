import pytest
import torch

import fake_peer
from bench import adapters, worker
from bench.adapters import Entry, Peer
from bench.cases import OPERATIONS, Shape, draw

SMALL = Shape("small", 2, 12, 2, 2, 8, 16)
STEP = Shape("step", 3, 1, 2, 4, 8, 16)
STEPS = {"steps": 2, "output_final_state": True}
FAKE = Peer(
    "fake_peer",
    {
        "delta": Entry("fake_peer", "key_first", half=("beta",)),
        "gdn": Entry(
            "fake_peer", "packed", linear=("log_decay",), state_key_first=False, packed=True,
            longest="longest",
        ),
        "gated_product2": Entry("fake_peer", "key_first", half=("beta",), options=STEPS),
        "decode": Entry(
            "fake_peer", "key_first", names={"log_decay": "g", "state": "initial_state"}
        ),
    },
)  # fmt: skip
# Of o, which is rounded to bfloat16, and of the state, which stays in float32.
ROUNDED, KEPT = 2**-8, 1e-5


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setitem(adapters.PEERS, "fake", FAKE)
    fake_peer.CALLS.clear()


def apart(peer, name, shape=SMALL):
    """How far o and state by the peer's conventions are from the definition in float64."""
    inputs = draw(OPERATIONS[name], shape, device="cpu")
    exact = adapters.exact_side(name).through(worker.widened(inputs))
    found = adapters.side(peer, name, "torch").through(inputs)
    assert [x is None or x.shape for x in found] == [x is None or x.shape for x in exact]
    again = draw(OPERATIONS[name], shape, device="cpu")
    assert all(torch.equal(inputs[x], again[x]) for x in inputs), "a step changed what it was given"
    return [
        None if y is None else ((x.double() - y).norm() / y.norm()).item()
        for x, y in zip(found, exact, strict=True)
    ]


@pytest.mark.parametrize("peer", ["fake", "deltarule"])
@pytest.mark.parametrize("name", FAKE.entries)
def test_a_peers_conventions_are_met(peer, name):
    o, state = apart(peer, name, STEP if name == "decode" else SMALL)
    assert o <= ROUNDED
    assert state <= KEPT


@pytest.mark.parametrize("name", [x for x in OPERATIONS if x not in ("softmax", "decode")])
def test_our_operators_behind_every_operation(name):
    assert apart("deltarule", name)[0] <= ROUNDED


def test_steps_in_place_of_decays(monkeypatch):
    """As of Mamba-2's authors, whose entry it has but for the module; two inputs are rounded."""
    entry = adapters.PEERS["mamba_ssm"].entries["simple_gla"]
    options = {"chunk_size": entry.options["chunk_size"]}
    entry = entry._replace(module="fake_peer", function="stepping", options=options)
    monkeypatch.setitem(adapters.PEERS, "fake", Peer("fake_peer", {"simple_gla": entry}))
    assert max(apart("fake", "simple_gla")) <= 2 * ROUNDED


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
    o, state = apart("torch", "softmax")
    assert o <= 2 * ROUNDED
    assert state is None


def test_inputs_change_dtype_before_the_clock_starts():
    apart("fake", "delta")
    assert fake_peer.CALLS[-1]["beta"] is torch.bfloat16


def test_rounding_to_bfloat16_changes_no_input():
    for name, operation in OPERATIONS.items():
        inputs = draw(operation, STEP if name == "decode" else SMALL, device="cpu")
        for gate in {"beta", "log_decay"} & set(inputs):
            assert inputs[gate].dtype is torch.float32
            assert torch.equal(inputs[gate], inputs[gate].bfloat16().float())


def test_gradients_pass_through_the_conversion():
    inputs = draw(OPERATIONS["gdn"], SMALL, device="cpu")
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    o, _ = adapters.side("fake", "gdn", "auto").through(leaves)
    gradients = torch.autograd.grad(o.sum(), list(leaves.values()))
    assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_flas_own_kernels_are_asked_for():
    """FLA calls FlashQLA where that is installed, unless it is told not to."""
    for name in ("fla", "fla-triton"):
        assert adapters.PEERS[name].environment["FLA_FLASH_QLA"] == "0"


def test_installed(monkeypatch):
    absent = adapters.PEERS["flash_qla"]._replace(package="no_such_package")
    monkeypatch.setitem(adapters.PEERS, "absent", absent)
    names = ("deltarule", "torch", "fake", "absent")
    assert [adapters.installed(name) for name in names] == [True, True, True, False]
