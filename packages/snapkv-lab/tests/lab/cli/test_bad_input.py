"""Bad input is reported in one line, before a model is loaded if that is possible."""

import sys

import pytest

EARLY = [
    ("eval needle --plot figure.gif", "plot: expected a file name that ends in .png, .svg, .pdf"),
    ("eval needle --plot no/figure.png", "plot: the file"),
    ("eval needle --lengths 100", "lengths: expected a value of at least 300, but got 100"),
    ("eval needle --lengths=", "lengths: expected at least one number, but got none"),
    (
        "eval needle --digits 5k",
        "digits: expected a value of at most 1,000, but got 5,120. Use a smaller value",
    ),
    ("eval needle --policy=", "policy: expected the name of a method, but got an empty name"),
    ("eval needle --haystack no/such", "no/such"),
    ("eval needle --policy snapvk", ". Did you mean snapkv?"),
    ("eval needle --policy snapkv:kernelsize=5", ". Did you mean kernel_size?"),
    ("eval needle --baseline fulll", ". Did you mean full"),
    ("eval needle --nothing 1", "No such option"),
    ("eval turns --turns recalled", "turns: expected one of append, compress, recall, but got"),
    (
        "eval needle --device cpu --ray local",
        "device: only one of device and ray can be used, but got cpu",
    ),
    ("eval needle --workers 2", "workers: this option can only be used with --ray, but got 2"),
    ("study hit-rate --samples 0", "samples: expected a value of at least 1"),
    ("study instructions -q Why?", "question: expected at least two"),
    ("study sensitivity --poolings max,median", "pooling: expected"),
    ("study sensitivity --bits int4,int8", "bits: expected one word"),
    ("eval needle --bits int5", "bits: expected exact, int8"),
    ("eval needle --bits int4,int4", "bits: expected exact, int8"),
    ("bench decode --shape llama-3.1-8b --model x", "model: expected none with"),
    ("bench throughput --batch 2", "batch: this command searches for the largest batch, but got 2"),
]
LATE = [
    ("eval needle --turns recall --lengths 300", "turns: recall has no effect with needle"),
    ("bench decode --baseline transformer", "baseline: expected one of transformers"),
    ("bench decode --shape llama-4", "shape: expected one of smollm2-135m"),
]


@pytest.mark.parametrize(("command", "message"), [*EARLY, *LATE], ids=lambda value: value[:40])
def test_bad_input_is_reported_in_one_line_with_status_2(snapkv, tiny_only, here, command, message):
    (here / "file").touch()
    done = snapkv(*command.split())
    assert (done.status, done.out) == (2, "")
    assert message in done.err
    assert done.err.count("snapkv: error: ") == 1
    assert [path.name for path in here.iterdir()] == ["file"]
    if (command, message) in EARLY:
        assert done.err.startswith("snapkv: error: ")
        assert done.err.count("\n") == 1
        assert tiny_only == []


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "lokal", "head:", ""])
def test_address_without_a_cluster_is_refused(snapkv, here, monkeypatch, address):
    monkeypatch.setattr("snapkv_lab.evaluate.on_ray._ray", lambda: None)
    done = snapkv("eval", "needle", "--ray", address)
    assert done.status == 2
    assert "expected local, auto or the address of a running cluster" in done.err


@pytest.mark.parametrize(
    ("package", "option"),
    [("matplotlib", "--plot n.png"), ("jinja2", "--report r"), ("ray", "--ray local")],
)
def test_missing_package_is_named_before_loading(
    snapkv, tiny_only, here, monkeypatch, package, option
):
    monkeypatch.setitem(sys.modules, package, None)
    done = snapkv("eval", "needle", *option.split())
    assert done.status == 2
    assert f"the package {package}, which is not installed. Run pip install" in done.err
    assert done.err.count("\n") == 1
    assert list(here.iterdir()) == tiny_only == []
