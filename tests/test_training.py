"""A network trained on text with selective_scan on tensors follows the one trained with the plain recurrence."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("cuscan.interop.torch", reason="PyTorch is not installed")
from bench import training  # noqa: E402


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads cost more than they do for tensors as small as these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("device", "steps", "falls_to", "sizes"),
    [
        pytest.param(
            "cpu", 25, 4, {"width": 32, "state": 8, "batch": 4, "length": 64}, marks=pytest.mark.full, id="cpu"
        ),
        pytest.param("cuda", 100, 2.3, {}, id="cuda"),  # 2.5 without a state
    ],
)
def test_training_follows_the_plain_recurrence_and_repeats(device, steps, falls_to, sizes, request):
    if device == "cuda":
        request.getfixturevalue("cuda_executor")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device for PyTorch")
    plain, network = training.train(training.recurrence, device, steps, **sizes)
    ours, ours_network = training.train(training.SCANS["cuscan"], device, steps, **sizes)
    assert len(ours) == steps
    assert max(training.differences({"cuscan": ours, "recurrence": plain})) < 1e-3
    assert ours[0] > 5.5
    assert sum(ours[-10:]) / 10 < falls_to
    # A gradient left out moves the loss by less than 1e-3 where it is that of A, D or delta_bias; not so these.
    weights = dict(network.named_parameters())
    for name, mine in ours_network.named_parameters():
        assert torch.dist(mine, weights[name]) < 1e-3 * weights[name].norm(), name

    again, again_network = training.train(training.SCANS["cuscan"], device, steps, **sizes)
    assert again == ours
    assert all(map(torch.equal, again_network.parameters(), ours_network.parameters()))
