"""Several findings per image: pictures of up to four others, privately on fixed features and by the engine.

python examples/several_findings.py     (the digits inside the package; half a minute on 2 idle cores)
python examples/several_findings.py --data cifar10 --num-images 20000 --epsilon 3 --ways features
"""

import argparse
from pathlib import Path
from tempfile import mkdtemp

import torch
from PIL import Image

import sfumato

GREY, OCCUPIED = 127, 0.5  # of an empty place; how many of the four places show an image


def compose(images: sfumato.data.ImageSet, count: int, folder: Path, split: str) -> list[str]:
    """Write ``count`` pictures of 2 x 2 places, each grey or with an image of its own; the manifest rows."""
    generator = torch.Generator().manual_seed(0 if split == "train" else 1)
    order, rows = iter(torch.randperm(len(images), generator=generator).tolist()), []
    taken = torch.rand(count, 4, generator=generator) < OCCUPIED
    channels, side = images.images.shape[1], max(8, images.images.shape[-1] // 2)
    small = torch.nn.functional.interpolate(images.images.float(), size=(side, side), mode="area").byte()
    for number, places in enumerate(taken.tolist()):
        picture, found = torch.full((channels, 2 * side, 2 * side), GREY, dtype=torch.uint8), set()
        for place, shown in enumerate(places):
            row = next(order, None) if shown else None  # no image is shown twice
            if row is not None:
                top, left = side * (place // 2), side * (place % 2)
                picture[:, top : top + side, left : left + side] = small[row]
                found.add(images.classes[int(images.labels[row])])
        file = f"{split}-{number:05}.png"
        Image.fromarray(picture.permute(1, 2, 0).squeeze(-1).numpy()).save(folder / file)
        rows.append(f"{file},{'|'.join(sorted(found))},{split}")  # an empty label: no finding
    return rows


def recipe_of(way: str, settings: dict[str, object], *, small: bool, quick: bool) -> sfumato.Recipe:
    """A linear head on fixed features, in closed form; or a small network, by the gradient engine."""
    if way == "features":
        recipe, scale = sfumato.load_recipe("fast/patches"), (200, 40) if quick else (1000, 300)
        fitting = {"features.num_images": scale[0], "model.options.num_directions": scale[1]}
    else:
        recipe = sfumato.load_recipe("default/folder")
        fitting = {"training.num_epochs": 1 if quick else 15, "model.options": {"width": 8, "groups": 4}}
    return sfumato.with_settings(recipe, {**settings, **(fitting if small else {})})


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--data", default="digits", help="a known set: digits, mnist, cifar10")
    options.add_argument("--num-images", type=int, default=1500)
    options.add_argument("--epsilon", type=float, default=8.0)
    options.add_argument("--ways", default="features,engine")
    options.add_argument("--out", type=Path, default=None)
    options.add_argument("--quick", action="store_true", help="a few steps only, to see that all works")
    chosen = options.parse_args()
    out = chosen.out or Path(mkdtemp())
    splits, folder = sfumato.load_data(chosen.data), out / "pictures"
    folder.mkdir(parents=True)
    rows = compose(splits.train, chosen.num_images, folder, "train")
    rows += compose(splits.test, chosen.num_images // 4, folder, "test")
    (folder / "manifest.csv").write_text("\n".join(["path,label,split", *rows]) + "\n")
    # declared: no image adds to them
    (folder / "findings.txt").write_text("\n".join(splits.train.classes) + "\n")
    side, channels = max(16, splits.train.images.shape[-1]), splits.train.images.shape[1]
    pictures = sfumato.load_data(folder, image_size=side, channels=channels)
    settings = {"data.image_size": side, "data.channels": channels, "privacy.epsilon": chosen.epsilon}
    for way in chosen.ways.split(","):
        recipe = recipe_of(way, settings, small=chosen.data == "digits", quick=chosen.quick)
        result = sfumato.train(recipe, out=out / way, data=pictures)
        print(f"{way}: epsilon {result.privacy['epsilon']:.2f}, mean AUC {result.scores.mean_auc:.3f}")
        print("  " + ", ".join(f"{name} {area or 0:.3f}" for name, area in result.scores.auc.items()))
    print(f"pictures, reports and releases are in {out}")


if __name__ == "__main__":
    main()
