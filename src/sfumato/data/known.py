"""The known data sets: where their files lie, what they must contain, where they come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sfumato.errors import DataError
from sfumato.files import data_home

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR100_NAMES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly "
    "camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup "
    "dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower "
    "leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid "
    "otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray "
    "road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar "
    "sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle "
    "wardrobe whale willow_tree wolf woman worm"
)
CIFAR100_CLASSES = tuple(_CIFAR100_NAMES.split())


@dataclass(frozen=True, kw_only=True)
class KnownSet:
    """A public data set that can be named instead of given as a folder."""

    name: str
    title: str
    folders: tuple[str, ...]  # accepted names under the data folder, the first is what `data get` writes
    image_size: int
    channels: int
    num_classes: int
    num_train: int
    num_test: int
    terms: str
    cite: str
    mirror: bool = True  # whether a mirrored image shows the same; writing does not

    @property
    def is_built_in(self) -> bool:
        """Whether nothing has to be fetched: inside the package, or drawn by it."""
        return not self.folders

    def locate(self) -> Path | None:
        """Its folder under ``data_home()``, or None."""
        for folder in self.folders:
            if (data_home() / folder).is_dir():
                return data_home() / folder
        return None

    def require(self) -> Path:
        """Its folder, or an error that says the command that fetches it."""
        folder = self.locate()
        if folder is None:
            raise DataError(
                "data-not-found",
                f"{self.name} is not in {data_home()} (looked for {' or '.join(self.folders)}).",
                why="Known sets are looked for under SFUMATO_DATA, by default the user's cache folder.",
                fix=f"Run: sfumato data get {self.name}",
            )
        return folder


KNOWN_SETS: dict[str, KnownSet] = {
    known.name: known
    for known in (
        KnownSet(
            name="digits",
            title="UCI handwritten digits (inside the package)",
            folders=(),
            image_size=8,
            channels=1,
            num_classes=10,
            num_train=3823,
            num_test=1797,
            terms="CC BY 4.0",
            cite="Alpaydin and Kaynak 1998",
            mirror=False,
        ),
        KnownSet(
            name="generated",
            title="dead leaves, labelled by how they were drawn; any size",
            folders=(),
            image_size=32,
            channels=3,
            num_classes=72,
            num_train=50_400,
            num_test=7_200,
            terms="none: nobody's data",
            cite="after Lee, Mumford and Huang 2001",
        ),
        KnownSet(
            name="mnist",
            title="MNIST handwritten digits",
            folders=("mnist",),
            image_size=28,
            channels=1,
            num_classes=10,
            num_train=60_000,
            num_test=10_000,
            terms="CC BY-SA 3.0",
            cite="LeCun et al. 1998",
            mirror=False,
        ),
        KnownSet(
            name="cifar10",
            title="CIFAR-10",
            folders=("cifar-10-batches-bin",),
            image_size=32,
            channels=3,
            num_classes=10,
            num_train=50_000,
            num_test=10_000,
            terms="no formal licence",
            cite="Krizhevsky 2009",
        ),
        KnownSet(
            name="cifar100",
            title="CIFAR-100 (fine labels)",
            folders=("cifar-100-binary",),
            image_size=32,
            channels=3,
            num_classes=100,
            num_train=50_000,
            num_test=10_000,
            terms="no formal licence",
            cite="Krizhevsky 2009",
        ),
        KnownSet(
            name="imagenette",
            title="ImageNette, ten easy classes of ImageNet",
            folders=("imagenette2-160", "imagenette2-320", "imagenette2", "imagenette"),
            image_size=160,
            channels=3,
            num_classes=10,
            num_train=9469,
            num_test=3925,
            terms="ImageNet terms, research only",
            cite="Howard 2019",
        ),
        KnownSet(
            name="tiny-imagenet",
            title="Tiny ImageNet, 200 classes",
            folders=("tiny-imagenet-200",),
            image_size=64,
            channels=3,
            num_classes=200,
            num_train=100_000,
            num_test=10_000,
            terms="ImageNet terms, research only",
            cite="Le and Yang 2015",
        ),
    )
}
