"""Train the tiny model that comes with this package anew: `make tiny-model`."""

import shutil

from lachesis.tiny_model import build


def main() -> None:
    """Replace the package's model by one trained from the default recipe (30 s of one core)."""
    recipe = build.TinyModelRecipe()
    shutil.rmtree(build.READY_MADE, ignore_errors=True)
    target = build.READY_MADE / build.get_tiny_model_path(recipe).name
    build.train_and_save(recipe, target)
    print(target)


if __name__ == "__main__":
    main()
