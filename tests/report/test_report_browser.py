"""The page in a real browser: it opens from the disk, says nothing on the console and shows what it holds."""

import shutil
import subprocess

import pytest

from planish.report.page import write_page
from planish.report.read import read_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH"),
]


def open_page(builder, tmp_path, *flags):
    page = builder.path / "report.html"
    write_page(read_run(builder.path), page)
    words = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr", "--log-level=0", "--window-size=1100,1200", *flags, page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)


@pytest.mark.parametrize("count", [1, 4, 400])
def test_the_page_opens_without_a_word_on_the_console(builder, tmp_path, count):
    builder.settings().steps(count).evaluations(1).prediction()
    done = open_page(builder, tmp_path, "--dump-dom")
    assert "CONSOLE" not in done.stderr
    assert "<svg" in done.stdout
    assert "model.layers.*.mlp.gate_proj.weight" in done.stdout
    assert done.stdout.count("<section") == 5


def test_dark_and_light_are_two_looks(finished, tmp_path):
    looks = []
    for flag in ("--blink-settings=preferredColorScheme=1", "--blink-settings=preferredColorScheme=0"):
        picture = tmp_path / f"{len(looks)}.png"
        open_page(finished, tmp_path, flag, f"--screenshot={picture}")
        looks.append(picture.read_bytes())
    assert looks[0] != looks[1]
