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
        pytest.param("cuda", 100, 3, {}, id="cuda"),
    ],
)
def test_training_follows_the_plain_recurrence_and_repeats(device, steps, falls_to, sizes, request):
    if device == "cuda":
        request.getfixturevalue("cuda_executor")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device for PyTorch")
    runs = {name: training.train(scan, device, steps, **sizes) for name, scan in training.SCANS.items()}
    losses = {name: run[0] for name, run in runs.items()}
    assert len(losses["cuscan"]) == steps
    assert max(training.differences(losses)) < 1e-3
    assert losses["cuscan"][0] > 5.5
    assert max(losses["cuscan"][-5:]) < falls_to

    again, network = training.train(training.SCANS["cuscan"], device, steps, **sizes)
    assert again == losses["cuscan"]
    for mine, its in zip(network.parameters(), runs["cuscan"][1].parameters(), strict=True):
        assert torch.equal(mine, its)
