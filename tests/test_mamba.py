"""The Mamba language model: against transformers, its own equations, and itself by other ways."""

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from bench import model as bench
from cuscan import mamba
from cuscan.mamba import _products, checkpoint, training
from cuscan.mamba.model import _drawn

TEXT = training.corpus()[0].astype(np.int64)
CONFIGS = {
    "mamba": mamba.Config(vocab=40, width=8, layers=2, rank=3, state=5),
    "falcon": mamba.Config(
        vocab=40, width=8, layers=2, rank=3, state=5, tied=False, use_bias=True, use_conv_bias=False, mixer_eps=1e-6,
        residual_in_fp32=False, channels=12, conv=3,
    ),
}  # fmt: skip


def make(config, dtype="float32", xp=np):
    """A model whose every parameter matters."""
    rng = np.random.default_rng(3)
    parameters = {}
    for name, x in mamba.initial_parameters(config, seed=0).items():
        x = x + 0.1 * rng.standard_normal(x.shape)
        parameters[name] = xp.asarray((x if config.vocab > 40 or "embed" not in name else 5 * x).astype(dtype))
    return mamba.Model(config, parameters)


def tokens(shape, vocab=40):
    return np.random.default_rng(1).integers(0, vocab, shape)


@pytest.fixture(params=["numpy", "cuda"])
def xp(request):
    return np if request.param == "numpy" else request.getfixturevalue("cupy")


@pytest.fixture
def cupy(cuda_executor):
    if not mamba.has_cublas():
        pytest.skip("no CUDA device with cuBLAS")
    return cuda_executor.xp


def host(x):
    return x if isinstance(x, np.ndarray) else x.get()


def apart(x, y):
    x, y = host(x).astype(np.float64), host(y).astype(np.float64)
    return np.linalg.norm(x - y) / np.linalg.norm(y)


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


# --- the equations -------------------------------------------------------------------------------------------------


def by_definition(model, row):
    """Logits of one row, in float64, a channel and a step at a time."""
    config, get = model.config, lambda name: host(model.parameters[name]).astype(np.float64)

    def norm(x, eps):
        return x / np.sqrt((x * x).mean() + eps)

    def silu(x):
        return x / (1 + np.exp(-x))

    def layer(i):
        name = f"backbone.layers.{i}."
        return name, {n[len(name) :]: get(n) for n in model.parameters if n.startswith(name)}

    layers = [layer(i)[1] for i in range(config.layers)]
    past = [[np.zeros(config.channels)] * (config.conv - 1) for _ in layers]
    states = [np.zeros((config.channels, config.state)) for _ in layers]
    found = []
    for token in row:
        x = get("backbone.embeddings.weight")[token]
        for p, before, h in zip(layers, past, states, strict=True):
            bias = p.get("mixer.in_proj.bias", 0)
            u, z = np.split(p["mixer.in_proj.weight"] @ (p["norm.weight"] * norm(x, config.eps)) + bias, 2)
            before.append(u)
            taps = p["mixer.conv1d.weight"][:, 0]
            u = sum(taps[:, k] * each for k, each in enumerate(before[-config.conv :])) + p.get("mixer.conv1d.bias", 0)
            u = silu(u)
            dt, B, C = np.split(p["mixer.x_proj.weight"] @ u, [config.rank, config.rank + config.state])
            if config.mixer_eps is not None:
                dt, B, C = (norm(each, config.mixer_eps) for each in (dt, B, C))
            delta = np.log1p(np.exp(p["mixer.dt_proj.weight"] @ dt + p["mixer.dt_proj.bias"]))[:, None]
            h[...] = np.exp(delta * -np.exp(p["mixer.A_log"])) * h + delta * B * u[:, None]
            y = (h @ C + p["mixer.D"] * u) * silu(z)
            x = x + p["mixer.out_proj.weight"] @ y + p.get("mixer.out_proj.bias", 0)
        head = get("backbone.embeddings.weight" if config.tied else "lm_head.weight")
        found.append(head @ (get("backbone.norm_f.weight") * norm(x, config.eps)))
    return np.array(found)


def test_logits_are_those_of_the_equations(config, xp):
    model, rows = make(config, xp=xp), tokens((2, 11))
    assert apart(model(rows), np.stack([by_definition(model, row) for row in rows])) < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_weights_err_by_their_rounding(dtype, config, xp):
    model, rows = make(config, getattr(ml_dtypes, dtype, dtype), xp), tokens((1, 30))
    logits = model(rows)
    assert logits.dtype == np.float32
    error, unit = apart(logits[0], by_definition(model, rows[0])), 2.0 ** (-8 if dtype == "bfloat16" else -11)
    assert unit / 8 < error < 4 * unit


def test_the_residual_stream_has_its_type(xp):
    for wide, dtype in ((True, np.float32), (False, ml_dtypes.bfloat16)):
        config = replace(CONFIGS["mamba"], residual_in_fp32=wide)
        model = make(config, ml_dtypes.bfloat16, xp)
        x = model.embed(xp.asarray(tokens((2, 3))))
        residual = model.norm(x, model.layers[0].norm, None)[1]
        assert residual.dtype == dtype
        normed, residual = model.norm(x, model.layers[0].norm, residual)
        assert (normed.dtype, residual.dtype) == (ml_dtypes.bfloat16, dtype)


def test_gradients_are_the_slopes(config):
    rows = tokens((2, 12))
    model = make(config, np.float64)
    loss, grads = mamba.loss_and_gradients(model, rows)
    logits = np.stack([by_definition(model, row[:-1]) for row in rows])
    chosen = np.take_along_axis(logits, rows[:, 1:, None], 2)[..., 0]
    assert np.isclose(loss, (np.log(np.exp(logits).sum(-1)) - chosen).mean(), rtol=1e-12)
    assert list(grads) == list(model.parameters)
    rng = np.random.default_rng(0)
    for name, x in model.parameters.items():
        direction = rng.standard_normal(x.shape)

        def moved(by, name=name, x=x, direction=direction):
            return mamba.Model(config, {**model.parameters, name: x + by * direction})

        above, below = (mamba.loss_and_gradients(moved(by), rows)[0] for by in (1e-5, -1e-5))
        slope = (above - below) / 2e-5
        assert np.isclose(slope, (grads[name] * direction).sum(), rtol=1e-5), name


def test_gradients_in_float32_are_those_in_float64_and_repeat(config, xp):
    rows = tokens((2, 70))
    loss, grads = mamba.loss_and_gradients(make(config, xp=xp), rows)
    again = mamba.loss_and_gradients(make(config, xp=xp), rows)[1]
    true_loss, true = mamba.loss_and_gradients(make(config, np.float64), rows)
    assert abs(float(loss) / true_loss - 1) < 1e-6
    for name, x in true.items():
        assert grads[name].dtype == np.float32
        assert apart(grads[name], x) < 2e-5, name
        assert host(grads[name]).tobytes() == host(again[name]).tobytes(), name


# --- states --------------------------------------------------------------------------------------------------------


def test_a_prompt_in_pieces_and_in_steps_gives_the_whole(config, xp):
    model, rows = make(config, xp=xp), tokens((3, 20))
    whole, last = model(rows, return_state=True)
    state = model(rows[:, :2], return_state=True)[1]  # fewer tokens than taps
    before = state.copy()
    piece, state = model(rows[:, 2:9], state=state, return_state=True)
    assert apart(piece, whole[:, 2:9]) < 1e-6
    assert apart(model(rows[:, 2:9], state=before, last_only=True), whole[:, 8]) < 1e-6
    for t in range(9, 20):
        assert apart(model.step(rows[:, t], state), whole[:, t]) < 1e-6
    for found, right in ((state.conv, last.conv), (state.scan, last.scan)):
        for x, y in zip(found, right, strict=True):
            assert apart(x, y) < 1e-6


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_give_what_they_give_alone(side, config, xp):
    model, lengths = make(config, xp=xp), [9, 1, 5, 3]
    rows, mask = tokens((4, 9)), np.zeros((4, 9), bool)
    for row, length in zip(mask, lengths, strict=True):
        row[9 - length if side == "left" else 0 : None if side == "left" else length] = True
    logits, state = model(rows, mask=mask, return_state=True)
    last = model(rows, mask=mask, last_only=True)
    made = model.generate(rows, 4, mask=mask)
    for i, counts in enumerate(mask):
        alone, after = model(rows[i, counts][None], return_state=True)
        assert apart(logits[i][counts], alone[0]) < 1e-6
        assert apart(last[i], alone[0, -1]) < 1e-6
        for found, right in ((state.conv, after.conv), (state.scan, after.scan)):
            for x, y in zip(found, right, strict=True):
                np.testing.assert_allclose(host(x[i]), host(y[0]), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(host(made[i]), host(model.generate(rows[i, counts][None], 4)[0]))


def test_more_rows_than_a_graph_takes(xp):
    model, rows = make(CONFIGS["mamba"], xp=xp), tokens((11, 6))
    made = host(model.generate(rows, 5))
    for i in (0, 10):
        np.testing.assert_array_equal(made[i], host(model.generate(rows[i : i + 1], 5)[0]))


def test_temperature(xp):
    model, rows = make(CONFIGS["mamba"], xp=xp), tokens((4, 6))

    def made(temperature, seed=0, count=30):
        return host(model.generate(rows, count, temperature=temperature, seed=seed))

    np.testing.assert_array_equal(made(1), made(1))
    assert (made(1) != made(1, seed=1)).mean() > 0.3
    np.testing.assert_array_equal(made(1e-4), made(0))
    assert model.generate(rows, 0).shape == (4, 0)


def test_drawn_tokens_have_their_probabilities(xp):
    draws = xp.asarray(((np.arange(1000) + 0.5) / 1000).astype(np.float32))[:, None]
    logits = np.log(np.array([0.2, 0.5, 1e-30, 0.3], np.float32))
    drawn = host(_drawn(xp, xp.asarray(np.tile(logits, (1000, 1))), draws))
    np.testing.assert_array_equal(np.bincount(drawn, minlength=4), [200, 500, 0, 300])
    almost = xp.asarray(np.full((1, 1), 1 - 2.0**-24, np.float32))
    assert int(_drawn(xp, xp.zeros((1, 7), np.float32), almost)[0]) == 6


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_on_the_cpu_give_what_numpy_gives(dtype, config, host_executor):
    model, rows, mask = make(config, getattr(ml_dtypes, dtype, dtype)), tokens((2, 9)), np.ones((2, 9), bool)
    mask[0, :3] = False

    def run():
        logits, state = model(rows, return_state=True)
        loss, grads = mamba.loss_and_gradients(model, rows)
        padded = model(rows, mask=mask, last_only=True)
        return [
            logits,
            model.step(rows[:, 0], state),
            *state.conv,
            *state.scan,
            padded,
            np.asarray(loss),
            *grads.values(),
        ]

    for found, right in zip(host_executor(run), run(), strict=True):
        assert apart(found, right) < (1e-5 if dtype == "float32" else 2e-2)


# --- products ------------------------------------------------------------------------------------------------------


class FakeCublas:
    """gemmEx on memory of the host, by cuBLAS's own words: matrices are column by column."""

    CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT = 68, -1

    @staticmethod
    def gemmEx(  # noqa: N802
        handle, turn_a, turn_b, m, n, k, alpha, a, type_a, lda, b, type_b, ldb, beta, c, type_c, ldc, compute, algorithm
    ):
        assert (handle, compute, algorithm) == ("handle", 68, -1)

        def matrix(address, kind, rows, columns, step):
            item = {0: np.dtype(np.float32), 2: np.dtype(np.float16), 14: checkpoint.bfloat16()}[kind]
            size = ((columns - 1) * step + rows) * item.itemsize
            assert step >= rows
            memory = np.frombuffer((ctypes.c_ubyte * size).from_address(address), item)
            return np.lib.stride_tricks.as_strided(memory, (rows, columns), (item.itemsize, step * item.itemsize))

        def number(address):
            return ctypes.c_float.from_address(address).value

        left = matrix(a, type_a, k, m, lda).T if turn_a else matrix(a, type_a, m, k, lda)
        right = matrix(b, type_b, n, k, ldb).T if turn_b else matrix(b, type_b, k, n, ldb)
        to = matrix(c, type_c, m, n, ldc)
        total = number(alpha) * (left.astype(np.float32) @ right.astype(np.float32))
        to[...] = total + number(beta) * to.astype(np.float32) if number(beta) else total


class OnDevice(np.ndarray):
    """A NumPy array with the address where CuPy's have it."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


@pytest.fixture(params=["numpy", "fake", "cuda"])
def where(request, monkeypatch):
    """Puts NumPy arrays where products are made."""
    if request.param != "fake":
        return request.getfixturevalue("cupy").asarray if request.param == "cuda" else np.asarray
    libs = pytest.importorskip("cupy_backends.cuda.libs", reason="CuPy is not installed")
    xp = SimpleNamespace(
        empty=lambda *given: np.empty(*given).view(OnDevice),
        array=lambda x, order: np.array(x, order=order).view(OnDevice),
        cuda=SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0)),
    )
    monkeypatch.setattr(_products, "module", lambda _: xp)
    monkeypatch.setattr(_products, "_handle", lambda _: "handle")
    monkeypatch.setitem(vars(libs), "cublas", FakeCublas)
    return lambda x: x.view(OnDevice)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_products_of_slices_and_transposes(dtype, where):
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    big = where(np.random.default_rng(0).standard_normal((40, 60)).astype(dtype))
    lefts = [big[:8, :16], big[3:11, 5:21], big.T[:8, :16], big[::2, ::3][:8, :16], big[:1, :16], big[:16, 7:8].T]
    rights = [big[5:21, 2:9], big.T[5:21, 2:9], big[:16, :1], big.T[:16, 3:4], big[:32:2, 1::2]]
    lefts += [big[8:9, :16][::-1], big[:8, :16][::-1], big[:9, :1], big.T[:9, :1]]
    for a in lefts:
        for b in rights:
            b = b[: a.shape[1]]
            exact, size = (f(host(a).astype(np.float64)) @ f(host(b).astype(np.float64)) for f in (np.positive, abs))
            found = _products.product(a, b, dtype=np.float32)
            assert (abs(host(found) - exact) <= 1e-6 * size).all()
            out = where(np.ones((a.shape[0] + 1, b.shape[1] + 2), np.float32))
            assert _products.product(a, b, out=out[1:, 2:], add=True) is not out
            assert (abs(host(out)[1:, 2:] - exact - 1) <= 1e-6 * (size + 1)).all()
            assert (host(out)[0] == 1).all()
            assert (host(out)[:, :2] == 1).all()
            rounded = _products.product(a, b)
            assert rounded.dtype == dtype
            assert (abs(host(rounded).astype(np.float64) - exact) <= 1e-6 * size + 2.0**-8 * abs(exact)).all()
    x, weight, bias = big[:6, :24].reshape(2, 3, 24), big[6:16, :24], big[20, :10]
    right = host(x).astype(np.float64) @ host(weight).astype(np.float64).T + host(bias).astype(np.float64)
    found = host(_products.linear(x[..., 3:17], weight[:, 3:17], bias, dtype=np.float32))
    part = host(x)[..., 3:17].astype(np.float64) @ host(weight)[:, 3:17].astype(np.float64).T + host(bias).astype(float)
    assert (abs(found - part) <= 1e-5 * abs(right).max()).all()


def test_capture_gives_the_steps_bits(cupy, config):
    for dtype in ("float32", ml_dtypes.bfloat16):
        for batch in (1, 8):
            model, rows = make(config, dtype, cupy), cupy.asarray(tokens((batch, 9)))
            state = model(rows, return_state=True)[1]
            other = state.copy()
            step = model.capture(state)
            noise = [cupy.full(1 << 20, np.nan, np.float32) for _ in range(8)]  # what the graph needs is not given away
            for t in range(9):
                np.testing.assert_array_equal(step(rows[:, t]).get(), model.step(rows[:, t], other).get())
            del noise


def test_the_benchmark_measures_a_small_model(cupy):
    config = mamba.Config(vocab=300, width=32, layers=2)
    model = mamba.Model(config, bench.random_parameters(config, cupy))
    assert 0 < bench.prefill(cupy, model)["scans_ms"] < 10
    row = bench.decode(cupy, model, 1, 1e12)
    assert row["weights_bytes"] == sum(x.nbytes for x in model.parameters.values())
    assert row["graph"]["tokens_per_s"] > row["steps"]["tokens_per_s"] > 0
    assert bench.train(cupy, config, 2, 64)["tokens_per_s"] > 0


# --- mistakes ------------------------------------------------------------------------------------------------------


def test_mistakes_are_named():
    config = CONFIGS["mamba"]
    model, rows = make(config), tokens((2, 5))
    mask, state = np.ones((2, 5), bool), model(rows, return_state=True)[1]
    for error, message, call in (
        (TypeError, "tokens must be integers, got float64", lambda: model(rows * 1.0)),
        (ValueError, r"\(batch, length\) and not be empty, got \(5,\)", lambda: model(rows[0])),
        (ValueError, r"\(batch,\) and not be empty, got \(2, 5\)", lambda: model.step(rows, state)),
        (ValueError, r"not be empty, got \(2, 0\)", lambda: model(rows[:, :0])),
        (ValueError, r"in \[0, 40\), got \d+ to 40", lambda: model(np.maximum(rows, 40 * (rows == rows.max())))),
        (ValueError, "got -1 to", lambda: model(rows - rows.min() - 1)),
        (TypeError, "mask must be of bool, got int64", lambda: model(rows, mask=mask.astype(np.int64))),
        (ValueError, r"mask must have .* shape \(2, 5\), got \(2, 4\)", lambda: model(rows, mask=mask[:, 1:])),
        (ValueError, "mask is False in all of row 1", lambda: model(rows, mask=mask & [[True], [False]])),
        (ValueError, "a mask goes with no state", lambda: model(rows, mask=mask, state=state)),
        (ValueError, "temperature must be .* at least 0, got -1", lambda: model.generate(rows, 1, temperature=-1)),
        (ValueError, r"two tokens or more, got shape \(2, 1\)", lambda: mamba.loss_and_gradients(model, rows[:, :1])),
        (TypeError, "a CUDA graph needs CuPy arrays", lambda: model.capture(state)),
        (ValueError, "layers must be at least 1, got 0", lambda: mamba.Config(vocab=2, width=2, layers=0)),
        (ValueError, "missing: backbone.norm_f.weight", lambda: mamba.Model(config, {})),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    mixed = dict(model.parameters)
    mixed["backbone.layers.1.mixer.x_proj.weight"] = mixed["backbone.layers.1.mixer.x_proj.weight"].astype(np.float16)
    with pytest.raises(TypeError, match=r"layers.1.mixer.x_proj.weight is float16, and .*embeddings.weight float32"):
        mamba.Model(config, mixed)


# --- transformers --------------------------------------------------------------------------------------------------


@pytest.fixture
def reference(tmp_path):
    """Makes a model of transformers with random weights, saved to tmp_path."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    kinds = {
        "mamba": (transformers.MambaConfig, transformers.MambaForCausalLM),
        "falcon": (transformers.FalconMambaConfig, transformers.FalconMambaForCausalLM),
    }

    def make(kind, dtype="float32", **options):
        config, network = kinds[kind]
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            network = network(config(vocab_size=256, hidden_size=32, num_hidden_layers=2, state_size=8, **options))
            for name, x in network.named_parameters():
                x += 0.1 * torch.randn_like(x)
                if "embeddings" in name and network.config.tie_word_embeddings:
                    x *= 0.2  # a token that is not likeliest to follow itself
        network = network.eval().to(getattr(torch, dtype))
        network.save_pretrained(tmp_path)
        return torch, network

    before = torch.get_num_threads()
    torch.set_num_threads(1)  # more cost more than they do for tensors as small as these
    yield make
    torch.set_num_threads(before)


KINDS = [
    pytest.param("mamba", {}, id="mamba"),
    pytest.param("mamba", {"use_conv_bias": False, "time_step_rank": 5, "residual_in_fp32": False}, id="options"),
    pytest.param("falcon", {"tie_word_embeddings": False, "use_bias": True}, id="falcon"),
]
quiet = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@quiet
@pytest.mark.full
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_logits_are_those_of_transformers(kind, options, xp, reference, tmp_path):
    torch, network = reference(kind, **options)
    rows = TEXT[None, :512]
    with torch.no_grad():
        right = network(torch.from_numpy(rows)).logits.numpy()
    assert apart(mamba.Model(*mamba.load(tmp_path, xp=xp))(rows), right) < 1e-5


@quiet
@pytest.mark.full
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_bfloat16_errs_no_more_than_transformers_does(kind, options, xp, reference, tmp_path):
    torch, network = reference(kind, "bfloat16", **options)
    rows = TEXT[None, :512]
    with torch.no_grad():
        theirs = network(torch.from_numpy(rows)).logits.float().numpy()
        right = network.double()(torch.from_numpy(rows)).logits.numpy()
    assert apart(mamba.Model(*mamba.load(tmp_path, xp=xp))(rows), right) < 1.1 * apart(theirs, right)


@quiet
@pytest.mark.full
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_greedy_tokens_are_those_of_transformers(kind, options, xp, reference, tmp_path):
    torch, network = reference(kind, **options)
    rows = TEXT[:64].reshape(2, 32)
    made = network.generate(
        torch.from_numpy(rows), max_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=None,
        attention_mask=torch.ones(rows.shape, dtype=torch.int64),
    )  # fmt: skip
    right = made.numpy()[:, 32:]
    assert len(set(right.ravel())) > 10
    model = mamba.Model(*mamba.load(tmp_path, xp=xp))
    np.testing.assert_array_equal(host(model.generate(rows, 64)), right)
    for _ in range(64):
        rows = np.concatenate([rows, host(model(rows, last_only=True).argmax(-1))[:, None]], 1)
    np.testing.assert_array_equal(rows[:, 32:], right)


@quiet
@pytest.mark.full
def test_gradients_are_those_of_transformers(reference, tmp_path):
    torch, network = reference("falcon", tie_word_embeddings=False, use_bias=True)
    rows = TEXT[:200].reshape(4, 50)
    logits = network(torch.from_numpy(rows[:, :-1])).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(rows[:, 1:]).flatten())
    loss.backward()
    mine, grads = mamba.loss_and_gradients(mamba.Model(*mamba.load(tmp_path)), rows)
    assert abs(mine / loss.item() - 1) < 1e-6
    for name, x in network.named_parameters():
        assert apart(grads[name], x.grad.numpy()) < 1e-4, name
