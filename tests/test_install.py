"""Wheel, sdist and editable install hold what they should; importing needs numpy alone, and little time."""

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DATA = {
    path.relative_to(ROOT).as_posix()
    for pattern in ("cuda_src/*.cu*", "cuscan/mamba/weights/*", "cuscan/testing/host/*.h", "cuscan/testing/host/*.cpp")
    for path in ROOT.glob(pattern)
}


def run(*command, cwd):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def environment(folder):
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("build")
    python = environment(folder / "venv")
    run(python, "-m", "pip", "install", "hatchling", cwd=folder)
    run(python, "-m", "hatchling", "build", "-d", folder / "dist", cwd=ROOT)
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.mark.full
def test_wheel_holds_the_data_files(archives):
    names = zipfile.ZipFile(archives["wheel"]).namelist()
    expected = {name.replace("cuda_src/", "cuscan/cuda_src/", 1) for name in DATA}
    assert {name for name in expected if "cuda_src" in name}
    assert expected <= set(names)
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"cuscan"}


@pytest.mark.full
def test_sdist_holds_what_a_wheel_is_built_from(archives):
    with tarfile.open(archives["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*DATA, "pyproject.toml", "README.md", "LICENSE", "tests/conftest.py"} <= names


@pytest.mark.full
@pytest.mark.parametrize("kind", ["wheel", "sdist", "editable"])
def test_fresh_environment_with_numpy_alone(kind, archives, tmp_path):
    python = environment(tmp_path / "venv")
    target = ["--editable", ROOT] if kind == "editable" else [archives[kind]]
    run(python, "-m", "pip", "install", *target, cwd=tmp_path)
    packages = run(python, "-m", "pip", "list", "--format", "freeze", cwd=tmp_path).lower()
    assert {line.split("==")[0] for line in packages.split()} <= {"cuscan", "numpy", "pip", "setuptools"}
    code = "from cuscan._source import folder; print(folder(), *sorted(x.name for x in folder().iterdir()))"
    where, *files = run(python, "-c", code, cwd=tmp_path).split()
    assert (Path(where) == ROOT / "cuda_src") == (kind == "editable")
    assert files == sorted(path.name for path in (ROOT / "cuda_src").iterdir())
    assert "Every check passed." in run(python, "-m", "cuscan", "demo", "--quick", cwd=tmp_path)


def test_import_is_quick_and_loads_no_framework():
    code = """
import sys, time, numpy
start = time.process_time()
import cuscan
seconds = time.process_time() - start
print(seconds, *{"cupy", "jax", "torch", "ml_dtypes", "hypothesis", "scipy"} & sys.modules.keys())
"""
    attempts = [run(sys.executable, "-c", code, cwd=ROOT).split() for _ in range(8)]  # one that nothing else disturbs
    assert [frameworks for _, *frameworks in attempts] == [[]] * 8
    assert min(float(seconds) for seconds, *_ in attempts) < 0.2
