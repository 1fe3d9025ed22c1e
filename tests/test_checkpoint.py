"""Checkpoints: what is written is read again, by transformers too, and what is wrong with a folder is named."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

from cuscan import mamba
from cuscan.mamba import checkpoint

CONFIG = mamba.Config(vocab=256, width=8, layers=2, rank=3)
FALCON = mamba.Config(
    vocab=256, width=8, layers=1, state=5, channels=24, conv=3, eps=1e-4, tied=False, use_bias=True, mixer_eps=1e-5
)
TOKENS = np.arange(60).reshape(2, 30)


def parameters_of(config, dtype="float32"):
    rng = np.random.default_rng(0)
    start = mamba.initial_parameters(config, 0)
    return {name: (x + 0.1 * rng.standard_normal(x.shape)).astype(dtype) for name, x in start.items()}


def dtype_named(name):
    return np.dtype(getattr(pytest.importorskip("ml_dtypes"), name, name))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("config", [CONFIG, FALCON], ids=["mamba", "falcon"])
def test_what_is_saved_is_loaded(config, dtype, tmp_path):
    parameters = parameters_of(config, dtype_named(dtype))
    mamba.save(tmp_path / "new" / "folder", config, parameters, metadata={"seed": "7"})
    found, loaded = mamba.load(tmp_path / "new" / "folder")
    assert found == config
    assert list(loaded) == list(parameters)
    for name, x in parameters.items():
        assert loaded[name].dtype == x.dtype
        assert loaded[name].tobytes() == x.tobytes()
    assert checkpoint.metadata(tmp_path / "new" / "folder" / "model.safetensors") == {"format": "pt", "seed": "7"}
    length = int.from_bytes((tmp_path / "new" / "folder" / "model.safetensors").read_bytes()[:8], "little")
    assert length % 8 == 0  # the items lie where they are fast to read
    # Over itself: what was loaded lies in the file.
    norm = parameters["backbone.norm_f.weight"]
    mamba.save(tmp_path / "new" / "folder", config, {**loaded, "backbone.norm_f.weight": norm + norm})
    assert mamba.load(tmp_path / "new" / "folder")[1]["backbone.norm_f.weight"].tobytes() == (norm + norm).tobytes()
    assert loaded["backbone.norm_f.weight"].tobytes() == norm.tobytes()
    assert sorted(x.name for x in (tmp_path / "new" / "folder").iterdir()) == ["config.json", "model.safetensors"]


def test_dtype_converts_all_but_what_the_scan_reads_in_float32(tmp_path):
    bfloat16 = dtype_named("bfloat16")
    parameters = parameters_of(CONFIG)
    mamba.save(tmp_path, CONFIG, parameters)
    _, loaded = mamba.load(tmp_path, dtype="bfloat16")
    wide = {name.rpartition("layers.")[2][2:] for name, x in loaded.items() if x.dtype == np.float32}
    assert wide == {"mixer.A_log", "mixer.D", "mixer.dt_proj.bias"}
    for name, x in loaded.items():
        assert x.tobytes() == parameters[name].astype(x.dtype).tobytes()
    mamba.save(tmp_path, CONFIG, {name: x.astype(bfloat16) for name, x in parameters.items()})
    for name, x in mamba.load(tmp_path, dtype="float32")[1].items():
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x, parameters[name].astype(bfloat16).astype(np.float32))


def test_dtype_is_a_name_and_imports_what_it_needs(tmp_path):
    with pytest.raises(ValueError, match="dtype must be one of float32, float16, bfloat16, got 'float64'"):
        mamba.load(tmp_path, dtype="float64")
    mamba.save(tmp_path, CONFIG, parameters_of(CONFIG))
    code = f"from cuscan import mamba; print(mamba.Model(*mamba.load({str(tmp_path)!r}, dtype='bfloat16')).dtype)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["bfloat16"]


def test_bfloat16_without_ml_dtypes_becomes_float32(tmp_path, monkeypatch):
    parameters = parameters_of(CONFIG, dtype_named("bfloat16"))
    mamba.save(tmp_path, CONFIG, parameters)
    monkeypatch.setattr(checkpoint, "bfloat16", lambda: None)
    for name, x in mamba.load(tmp_path)[1].items():
        assert x.dtype == np.float32
        np.testing.assert_array_equal(x, parameters[name].astype(np.float32))


def change(tmp_path, change_config=lambda _: None, change_parameters=lambda _: None):
    config, parameters = CONFIG.to_json(), parameters_of(CONFIG)
    change_config(config)
    change_parameters(parameters)
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint.write(tmp_path / "model.safetensors", parameters, {})


def test_everything_that_does_not_fit_is_listed(tmp_path):
    def wrong(parameters):
        del parameters["backbone.layers.0.mixer.D"], parameters["backbone.norm_f.weight"]
        parameters["backbone.layers.2.norm.weight"] = np.zeros(8, np.float32)
        parameters["backbone.layers.1.mixer.conv1d.weight"] = np.zeros((16, 4), np.float32)

    change(tmp_path, change_parameters=wrong)
    with pytest.raises(ValueError, match="do not fit") as caught:
        mamba.load(tmp_path)
    assert str(caught.value).splitlines()[1:] == [
        "  missing: backbone.layers.0.mixer.D (16,)",
        "  missing: backbone.norm_f.weight (8,)",
        "  left over: backbone.layers.2.norm.weight (8,)",
        "  wrong shape: backbone.layers.1.mixer.conv1d.weight (16, 4), expected (16, 1, 4)",
    ]
    with pytest.raises(ValueError, match=r"wrong type: backbone.norm_f.weight float64, expected float32, float16"):
        mamba.save(tmp_path, CONFIG, {**parameters_of(CONFIG), "backbone.norm_f.weight": np.zeros(8)})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_type", "mamba2", "model_type 'mamba2', expected 'mamba' or 'falcon_mamba'"),
        ("hidden_act", "gelu", "hidden_act 'gelu', expected 'silu'"),
        ("vocab_size", None, "config.json has no vocab_size"),
        ("num_hidden_layers", 3, "missing: backbone.layers.2.norm.weight"),
        ("tie_word_embeddings", False, r"missing: lm_head.weight \(256, 8\)"),
        ("conv_kernel", 3, r"conv1d.weight \(16, 1, 4\), expected \(16, 1, 3\)"),
        ("state_size", 0, "state must be at least 1, got 0"),
    ],
)
def test_configurations_that_do_not_fit(key, value, message, tmp_path):
    change(tmp_path, lambda config: config.pop(key) if value is None else config.update({key: value}))
    with pytest.raises(ValueError, match=message):
        mamba.load(tmp_path)


def test_a_tied_head_in_the_file_must_be_the_embedding(tmp_path):
    change(tmp_path, change_parameters=lambda p: p.update({"lm_head.weight": p["backbone.embeddings.weight"]}))
    assert "lm_head.weight" not in mamba.load(tmp_path)[1]
    change(tmp_path, change_parameters=lambda p: p.update({"lm_head.weight": p["backbone.embeddings.weight"] + 1}))
    with pytest.raises(ValueError, match=r"lm_head.weight differs from backbone.embeddings.weight"):
        mamba.load(tmp_path)


def test_old_names_and_defaults_of_the_configuration(tmp_path):
    def older(config):
        for key in ("intermediate_size", "tie_word_embeddings", "layer_norm_epsilon", "use_bias", "state_size"):
            del config[key]
        config["time_step_rank"] = "auto"
        config["expand"] = 2

    def renamed(parameters):
        parameters["backbone.embedding.weight"] = parameters.pop("backbone.embeddings.weight")
        for i in range(2):
            name = f"backbone.layers.{i}.mixer."
            parameters[name + "x_proj.weight"] = parameters[name + "x_proj.weight"][2:]
            parameters[name + "dt_proj.weight"] = parameters[name + "dt_proj.weight"][:, 2:]

    change(tmp_path, older, renamed)
    config, parameters = mamba.load(tmp_path)
    assert config == mamba.Config(vocab=256, width=8, layers=2)
    sizes = {"vocab_size": 256, "hidden_size": 8, "num_hidden_layers": 2, "expand": 3}
    assert mamba.Config.from_json({"model_type": "mamba", "mixer_rms_eps": 1e-6, **sizes}) == mamba.Config(
        vocab=256, width=8, layers=2, channels=24
    )
    assert mamba.Config.from_json({"model_type": "falcon_mamba", **sizes}).mixer_eps == 1e-6
    assert parameters["backbone.embeddings.weight"].shape == (256, 8)


def test_broken_files(tmp_path):
    change(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for data, message in (
        (whole[:-1], r"has bytes \d+ to (\d+) of \d+"),
        (whole[:100], "no safetensors file, or is cut off"),
        (b"", "no safetensors file, or is cut off"),
        (b"\x04" + bytes(7) + b"abcd", "is no safetensors file: "),
        (whole.replace(b'"F32"', b'"I32"', 1), r"embeddings.weight is of type I32, expected F32, F16, BF16"),
        (whole.replace(b'"F32"', b'"F16"', 1), r"embeddings.weight has bytes 0 to 8192 of \d+, and 4096 by its shape"),
    ):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            mamba.load(tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape("model.safetensors")):
        mamba.load(tmp_path)


def test_files_that_an_index_names(tmp_path):
    change(tmp_path)
    parameters = parameters_of(CONFIG)
    (tmp_path / "model.safetensors").unlink()
    names = list(parameters)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        checkpoint.write(tmp_path / file, {name: parameters[name] for name in held}, {})
    where = {name: file for file, held in parts.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    for name, x in mamba.load(tmp_path)[1].items():
        assert x.tobytes() == parameters[name].tobytes()
    mamba.save(tmp_path, CONFIG, {name: 2 * x for name, x in parameters.items()})  # beside what is older
    assert (mamba.load(tmp_path)[1]["backbone.norm_f.weight"] == 2 * parameters["backbone.norm_f.weight"]).all()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=re.escape("b.safetensors")):
        mamba.load(tmp_path)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("config", [CONFIG, FALCON], ids=["mamba", "falcon"])
def test_transformers_reads_what_is_written_and_writes_what_is_read(config, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    for dtype in ("float32", "bfloat16"):
        parameters = parameters_of(config, dtype_named(dtype))
        mamba.save(tmp_path / "mine", config, parameters)
        network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
        assert network.dtype == getattr(torch, dtype)
        assert type(network).__name__ == config.to_json()["architectures"][0]
        network.save_pretrained(tmp_path / "theirs", max_shard_size="5KB")
        assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
        again, loaded = mamba.load(tmp_path / "theirs")
        assert again == config
        assert loaded.keys() == parameters.keys()
        for name, x in parameters.items():
            assert loaded[name].tobytes() == x.tobytes(), name
        with torch.no_grad():
            right = network.double()(torch.from_numpy(TOKENS)).logits.numpy()
        logits = mamba.Model(config, {name: x.astype(np.float64) for name, x in loaded.items()})(TOKENS)
        np.testing.assert_allclose(logits, right, rtol=1e-5, atol=1e-6)
