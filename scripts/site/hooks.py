"""Hooks of mkdocs: pages that are made from the code, and documents that lie at the root.

See https://www.mkdocs.org/user-guide/configuration/#hooks. Nothing is written into `docs/`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.site.pictures import FENCE, name_of  # noqa: E402

AT_ROOT = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "clients/js/README.md": "clients/js.md",
    "clients/python/README.md": "clients/python.md",
}
"""Documents outside `docs/`, and where they are in the site."""

LIBRARY: dict[str, tuple[str, ...]] = {
    "front door": ("recommender", "recipes", "model_config", "train_config", "errors"),
    "data": ("data.dataset", "data.interactions", "data.splits", "data.synthetic", "data.snapshot"),
    "models": (
        "models.base", "models.nbpr", "models.dncr", "models.neupr", "models.twotower",
        "models.user_embeddings", "models.self_attention",
    ),
    "training": (
        "training.trainer", "training.pretraining", "training.losses", "training.batches",
        "training.initializers", "training.next_item", "training.warm_start", "training.ranks",
    ),
    "ranking": ("ranking.algorithm1", "ranking.ranker", "ranking.candidates"),
    "inference": ("inference.engine", "inference.retrieval", "checkpoint", "manifest"),
    "fold-in": ("fold_in.users", "fold_in.items", "fold_in.evidence"),
    "attributes": (
        "content.encoder", "content.placement", "content.selection", "content.maps",
    ),
    "explanations": ("explain.influence", "explain.elicitation"),
    "evaluation": (
        "evaluation.metrics", "evaluation.protocols", "evaluation.significance",
        "evaluation.calibration", "evaluation.beyond_accuracy", "evaluation.by_gap", "comparison",
        "online",
    ),
}  # fmt: skip
"""Modules of `ncr_core` by the page that describes them."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages."""
    from app.cli.main import app as commands
    from app.core.settings import Settings
    from app.main import create_app
    from scripts.site import command_reference, http_reference, metrics_reference

    made = {
        "reference/http.md": http_reference.page(create_app(Settings()).openapi()),
        "reference/commands.md": command_reference.page(commands),
        "reference/metrics.md": metrics_reference.page(),
        **{f"reference/library/{_slug(t)}.md": _library_page(t, m) for t, m in LIBRARY.items()},
    }
    for document, place in AT_ROOT.items():
        made[place] = with_links_from(ROOT / document, place)
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links from `docs/` to documents and files outside it."""
    if page.file.generated_by:
        return markdown
    return _rewritten(markdown, ROOT / "docs" / page.file.src_uri, page.file.src_uri)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Scripts come from the site itself."""
    return _without_cdn(output, page.file.dest_uri)


def on_post_template(output: str, template_name: str, config: Any) -> str:
    """Pages without a document, such as `404.html`."""
    return _without_cdn(output, template_name)


def _without_cdn(output: str, place: str) -> str:
    """The script that searches pages opened from a folder is our copy of it."""
    own = relpath("assets/iframe-worker.js", str(PurePosixPath(place).parent))
    return output.replace("https://unpkg.com/iframe-worker/shim", own)


def with_links_from(document: Path, place: str) -> str:
    """The text of a document, whose links hold from its place in the site."""
    return _rewritten(document.read_text(encoding="utf-8"), document, place)


def _rewritten(text: str, document: Path, place: str) -> str:
    def link(match: re.Match[str]) -> str:
        target, _, anchor = match[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        path = normpath(relpath(document.parent / target, ROOT))
        page = _page(path)
        if page is None:  # a file of the repository that is no page: named, not linked
            return match[1] if f"`{path}`" == match[1] else f"{match[1]} (`{path}`)"
        hash_ = f"#{anchor}" if anchor else ""
        return f"[{match[1]}]({relpath(page, str(PurePosixPath(place).parent))}{hash_})"

    def picture(match: re.Match[str]) -> str:
        path = relpath(f"assets/pictures/{name_of(match[1])}", str(PurePosixPath(place).parent))
        return f"![diagram]({path})"

    return FENCE.sub(picture, re.sub(r"\[([^\]]*)\]\(([^)\s]+)\)", link, text))


def _page(path: str) -> str | None:
    """Where a file of the repository is in the site; None if it is not there."""
    if path in AT_ROOT:
        return AT_ROOT[path]
    if not path.startswith("docs/"):
        return None
    inside = path.removeprefix("docs/")
    return f"{inside}/README.md" if (ROOT / path).is_dir() else inside


def _slug(title: str) -> str:
    return title.replace(" ", "-")


def _library_page(title: str, modules: tuple[str, ...]) -> str:
    head = f"# `ncr_core`: {title}\n\n*For those who use the library.* "
    return (
        head
        + "Made from the docstrings.\n"
        + "".join(f"\n## `ncr_core.{module}`\n\n::: ncr_core.{module}\n" for module in modules)
    )
