import torch

from bench import measure


def test_saved_bytes_counts_each_storage_once():
    def operator(inputs):
        x = inputs["x"]
        # Both products save x (once counted); the first saves its own result for the second.
        square = x * x
        return square * x[:10]

    x = torch.randn(10, 100)
    assert measure.saved_bytes(operator, {"x": x}) == 2 * x.nbytes


def test_saved_bytes_sees_a_whole_storage_behind_a_view():
    def operator(inputs):
        return inputs["x"][:1].exp() * inputs["x"][:1].detach()

    x = torch.randn(10, 100)
    # exp saves its result, the product saves both factors: the detached one keeps all of x alive.
    assert measure.saved_bytes(operator, {"x": x}) == x.nbytes + x[:1].nbytes


def test_runs_take_turns():
    calls = []
    runs = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = measure.interleaved_seconds(runs, repeats=3)
    assert calls == ["a", "b"] * 4
    assert [len(seconds[name]) for name in "ab"] == [3, 3]


def test_spread():
    found = measure.spread([3.0, 1.0, 2.0, 5.0, 4.0])
    assert found == {"median": 3.0, "lower_quartile": 2.0, "upper_quartile": 4.0}


def test_gradients_belong_to_their_inputs():
    inputs = {"x": torch.tensor(3.0), "y": torch.tensor(5.0)}
    output, gradients = measure.forward_backward(
        lambda inputs: inputs["x"] * inputs["y"], inputs, torch.tensor(2.0)
    )
    assert output == 15
    assert gradients == {"x": torch.tensor(10.0), "y": torch.tensor(6.0)}
