"""Training: the optimizer, `python -m cuscan train`, the curve of torch, and the weights that come with the package."""

import json
import math

import numpy as np
import pytest

from cuscan import demo, mamba
from cuscan.__main__ import main
from cuscan.mamba import checkpoint, training

WEIGHTS = demo.WEIGHTS / "model.safetensors"


def test_adamw_steps_worked_by_hand():
    parameters = {
        name: np.full(shape, 1.0, np.float32) for name, shape in (("w", (2, 2)), ("bias", 2), ("A_log", (1, 1)))
    }
    optimizer = mamba.AdamW(parameters, betas=(0.5, 0.75), eps=0.0, decay=0.5, clip=20.0)
    # A first step: m / (1 - b1) = g and v / (1 - b2) = g g, so that it is one of rate against g's sign.
    grads = {"bias": np.array([-4, 1.0], np.float32), "w": np.full((2, 2), 3.0, np.float32)}
    grads["A_log"] = np.full((1, 1), 0.1, np.float32)
    optimizer.update(grads, 0.1)
    np.testing.assert_allclose(optimizer.parameters["w"], 0.95 - 0.1, rtol=1e-6)
    assert optimizer.parameters["bias"][0] == pytest.approx(1.1)
    assert optimizer.parameters["A_log"][0, 0] == pytest.approx(0.9)
    assert parameters["w"][0, 0] == 1
    # Then g = 6: m = 1.5 / 2 + 6 / 2 over 1 - 1/4 is 5, and v = 9/4 * 3/4 + 36/4 = 171/16 over 1 - 9/16 is 171/7.
    optimizer.update({**grads, "w": np.full((2, 2), 6.0, np.float32)}, 0.1)
    np.testing.assert_allclose(optimizer.parameters["w"], 0.85 * 0.95 - 0.1 * 5 / (171 / 7) ** 0.5, rtol=1e-6)


def test_large_gradients_are_clipped():
    def moved(size, eps):
        optimizer = mamba.AdamW({"x": np.zeros(4, np.float32)}, eps=eps, clip=2.0)
        optimizer.update({"x": np.array([3, -4, 0, 0], np.float32) * size}, 1.0)
        return optimizer.parameters["x"]

    # An eps that is large beside sqrt(v) makes a step proportional to the gradient: 2 / 5 of (3, -4) at most.
    np.testing.assert_allclose(moved(1, 1e6)[:2] * 1e6, [-1.2, 1.6], rtol=1e-5)
    np.testing.assert_allclose(moved(100, 1e6)[:2] * 1e6, [-1.2, 1.6], rtol=1e-5)
    np.testing.assert_allclose(moved(0.1, 1e6)[:2] * 1e6, [-0.3, 0.4], rtol=1e-5)


def test_adamw_is_torchs():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    rng = np.random.default_rng(0)
    shapes = {"proj.weight": (3, 4), "A_log": (2, 3), "bias": (5,)}
    start = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    optimizer = mamba.AdamW(start, betas=(0.8, 0.9), eps=1e-3, decay=0.3, clip=1.5)
    theirs = {name: torch.tensor(x, requires_grad=True) for name, x in start.items()}
    groups = [
        {"params": [theirs["proj.weight"]], "weight_decay": 0.3},
        {"params": [theirs["A_log"], theirs["bias"]], "weight_decay": 0.0},
    ]
    other = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-3)
    for step in range(20):
        grads = {name: rng.standard_normal(shape).astype(np.float32) * 0.1 * step for name, shape in shapes.items()}
        rate = training.rate_at(step, 20, 0.1, warmup=5)
        optimizer.update(grads, rate)
        for name, x in theirs.items():
            x.grad = torch.from_numpy(grads[name])
        torch.nn.utils.clip_grad_norm_(list(theirs.values()), 1.5)
        for group in other.param_groups:
            group["lr"] = rate
        other.step()
    for name, x in theirs.items():
        np.testing.assert_allclose(optimizer.parameters[name], x.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_rates_rise_and_fall():
    rates = [training.rate_at(step, 100, 2.0, warmup=10) for step in range(100)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 5)
    assert rates[10] == 2
    assert rates[55] == pytest.approx(1.1)
    assert 0.2 < rates[99] < 0.202
    assert sorted(rates[10:], reverse=True) == rates[10:]


def test_text_held_out_is_not_trained_on():
    train, held_out = (" ".join(x.tobytes().decode().split()) for x in training.corpus())
    assert len(held_out) > 20000
    assert len(train) > 7 * len(held_out)
    found = [begin for begin in range(0, len(held_out) - 150, 50) if held_out[begin : begin + 150] in train]
    assert found == []


def test_bits_of_pieces_are_those_of_the_whole():
    config = mamba.Config(vocab=256, width=8, layers=1)
    model = mamba.Model(config, mamba.initial_parameters(config, 0))
    text = training.corpus()[1][:200]
    logits = model(text[None, :-1].astype(np.int64))[0].astype(np.float64)
    share = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    right = -np.log2(share[np.arange(199), text[1:]]).mean()
    assert training.bits_per_byte(model, text) == pytest.approx(right, rel=1e-5)
    assert training.bits_per_byte(model, text, piece=7) == pytest.approx(right, rel=1e-5)


def test_train_learns_saves_and_repeats(tmp_path, capsys):
    options = ["--steps", "40", "--width", "16", "--layers", "1", "--batch", "2", "--length", "32", "--rate", "0.02"]
    for out in ("first", "second"):
        assert main(["train", *options, "--seed", "5", "--out", str(tmp_path / out)]) == 0
    first, second = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("first", "second"))
    assert first == second
    lines = capsys.readouterr().out.splitlines()
    table = [line.split() for line in lines if line.strip()[0].isdigit() and line.endswith("%")]
    assert [int(row[0]) for row in table] == 2 * list(range(2, 41, 2))
    assert float(table[0][1]) == pytest.approx(8, abs=0.2)
    assert float(table[-1][1]) < 6
    assert all(float(row[2]) > 0 for row in table)
    assert all(0 < int(row[3][:-1]) < 100 for row in table)
    config, parameters = mamba.load(tmp_path / "first")
    assert (config.vocab, config.width, config.layers) == (256, 16, 1)
    notes = checkpoint.metadata(tmp_path / "first" / "model.safetensors")
    assert notes["command"] == (
        "python -m cuscan train --seed 5 --steps 40 --width 16 --layers 1 --batch 2 --length 32 --rate 0.02"
    )
    wide = {name: x.astype(np.float32) for name, x in parameters.items()}
    bits = training.bits_per_byte(mamba.Model(config, wide), training.corpus()[1])
    assert float(notes["held_out_bits_per_byte"]) == pytest.approx(bits, abs=2e-4)
    assert f"held out: {bits:.3f} bits a byte" in lines


def test_weights_that_come_with_the_package():
    assert WEIGHTS.stat().st_size < 2e6
    notes = checkpoint.metadata(WEIGHTS)
    assert notes["command"].startswith("python -m cuscan train --seed ")
    bits = training.bits_per_byte(mamba.Model(*mamba.load(demo.WEIGHTS, dtype="float32")), training.corpus()[1][:2048])
    assert bits < 3  # 4.6 by the frequencies of the bytes alone
    assert math.isclose(bits, float(notes["held_out_bits_per_byte"]), rel_tol=0.3)
    assert json.loads((demo.WEIGHTS / "config.json").read_text())["architectures"] == ["MambaForCausalLM"]


def test_the_demo_sees_a_model_that_is_wrong(monkeypatch, capsys):
    right = mamba.Model.step

    def forgetful(self, tokens, state):
        state.scan[0][...] = 0
        return right(self, tokens, state)

    monkeypatch.setattr(mamba.Model, "step", forgetful)
    assert not demo.language_model(np, 300)
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_training_follows_torch():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    from bench import model_training
    from bench.training import differences

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        losses = model_training.compare(np, 50, batch=2, length=48)
    finally:
        torch.set_num_threads(before)
    assert len(losses["cuscan"]) == 50
    assert max(differences(losses)) < 1e-3
    assert losses["cuscan"][0] > 5.5
    assert sum(losses["cuscan"][-5:]) / 5 < 4
