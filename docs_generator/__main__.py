"""Write the pages that are made from the code: `python -m docs_generator`."""

from docs_generator.generated import GENERATED_PAGES, render_generated_page
from docs_generator.site import DOCS


def main() -> None:
    """Write each page whose text has changed."""
    for path in GENERATED_PAGES:
        file, text = DOCS / path, render_generated_page(path)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            print(f"wrote docs/{path}")


if __name__ == "__main__":
    main()
