"""DeepPrint: a fixed-length, unit-norm embedding of a fingerprint image, from its texture, its minutiae or both.

Engelsma, Cao and Jain, "Learning a fixed-length fingerprint representation" (TPAMI 2021, arXiv:1904.01099). The trunk
is Inception-v4: Szegedy, Ioffe, Vanhoucke and Alemi (2016, arXiv:1602.07261, figures 3 to 8).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

SMALLEST_INPUT_PX = 75
"""Side of the smallest image that leaves one cell after the last reduction."""

MAP_CHANNELS = 6
"""Of a minutia map: one for each direction k * 60 degrees."""


BRANCHES = {
    "deepprint_tex": ("texture",),
    "deepprint_minu": ("minutia",),
    "deepprint_texminu": ("texture", "minutia"),
}
"""The branches of each network, by `model.name`."""


class BranchOutputs(NamedTuple):
    """Outputs of the branches for one batch."""

    embeddings: list[Tensor]  # (B, D / branches) float32 of unit length, in the order of `BRANCHES`
    minutia_BCHW: Tensor | None  # the map that `MinutiaMapHead` reads; None without the minutia branch
    pose_B23: Tensor | None  # of the aligner, as `affine_grid` takes it; None without one


class DeepPrint(nn.Module):
    """Stem, one or two branches and, optionally, an alignment network in front of them.

    Shapes: B images, C channels, H x W pixels, D embedding size. At width 1 and 299 x 299 pixels the maps are
    384 x 35 x 35 after the stem; in the texture branch 1024 x 17 x 17 and 1536 x 8 x 8 after the two reductions, in the
    minutia branch 1024 x 9 x 9 before it is pooled. Any size from `SMALLEST_INPUT_PX` works, because the last maps are
    pooled as a whole.

    Args:
        name: a key of `BRANCHES`.
        channels: of the image.
        embedding_dims: D; two branches have half of it each.
        width: factor on every channel count of the trunk; 1 as in the paper.
        blocks: number of blocks A, B and C of the texture branch; (4, 7, 3) as in the paper.
        dropout: probability of dropping a feature before the last layer.
        aligner: aligns the image first; None: no alignment.
    """

    def __init__(
        self,
        *,
        name: str = "deepprint_tex",
        channels: int = 1,
        embedding_dims: int = 512,
        width: float = 1.0,
        blocks: Sequence[int] = (4, 7, 3),
        dropout: float = 0.2,
        aligner: "Aligner | None" = None,
    ) -> None:
        super().__init__()
        self.branches = BRANCHES[name]
        self.aligner = aligner
        self.stem = Stem(channels, width)
        channels, dims = self.stem.out_channels, embedding_dims // len(self.branches)
        has_texture, has_minutia = ("texture" in self.branches, "minutia" in self.branches)
        self.texture = TextureBranch(channels, dims, width, blocks, dropout) if has_texture else None
        self.minutia = MinutiaBranch(channels, dims, width, dropout) if has_minutia else None

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Return the embeddings (B, D) float32, each of unit length.

        Of two branches they are the embeddings of both, divided by the square root of 2: the cosine of two prints is
        the mean of the branches' cosines.
        """
        embeddings = self.compute_branches(image_BCHW).embeddings
        return torch.cat(embeddings, dim=1) / math.sqrt(len(embeddings))

    def compute_branches(self, image_BCHW: Tensor) -> BranchOutputs:
        """Return what `forward` joins, and what training needs besides."""
        pose_B23 = minutia_BCHW = None
        if self.aligner is not None:
            pose_B23 = self.aligner.find_pose(image_BCHW)
            image_BCHW = self.aligner.align(image_BCHW, pose_B23)
        x_BCHW, embeddings = self.stem(image_BCHW), []
        if self.texture is not None:
            embeddings.append(self.texture(x_BCHW))
        if self.minutia is not None:
            minutia_BCHW = self.minutia.stem(x_BCHW)
            embeddings.append(self.minutia(minutia_BCHW))
        return BranchOutputs(embeddings, minutia_BCHW, pose_B23)

    def list_blocks(self) -> list[nn.Module]:
        """Return the Inception blocks of the branches."""
        texture = [] if self.texture is None else [*self.texture.blocks]
        return texture if self.minutia is None else [*texture, *self.minutia.stem]


class Stem(nn.Sequential):
    """(B, 1, 299, 299) to (B, 384, 35, 35), 605,152 parameters for gray images (figure 3)."""

    def __init__(self, channels: int, width: float) -> None:
        c32, c64, c96, c192 = (scale_channels(c, width) for c in (32, 64, 96, 192))
        first = Concat(c64, nn.MaxPool2d(3, 2), Conv(c64, c96, 3, stride=2, valid=True))
        c160 = first.out_channels
        second = Concat(
            c160,
            nn.Sequential(Conv(c160, c64, 1), Conv(c64, c96, 3, valid=True)),
            nn.Sequential(
                Conv(c160, c64, 1),
                Conv(c64, c64, (1, 7)),
                Conv(c64, c64, (7, 1)),
                Conv(c64, c96, 3, valid=True),
            ),
        )
        c_out = second.out_channels
        third = Concat(c_out, Conv(c_out, c192, 3, stride=2, valid=True), nn.MaxPool2d(3, 2))
        super().__init__(
            Conv(channels, c32, 3, stride=2, valid=True),
            Conv(c32, c32, 3, valid=True),
            Conv(c32, c64, 3),
            first,
            second,
            third,
        )
        self.out_channels = third.out_channels


class TextureBranch(nn.Module):
    """Maps the stem's output to a unit-norm embedding (B, D)."""

    def __init__(self, channels: int, embedding_dims: int, width: float, blocks: Sequence[int], dropout: float) -> None:
        super().__init__()
        count_a, count_b, count_c = blocks
        layers: list[Concat] = []
        for build_block, count in (
            (build_inception_a, count_a),
            (build_reduction_a, 1),
            (build_inception_b, count_b),
            (build_reduction_b, 1),
            (build_inception_c, count_c),
        ):
            for _ in range(count):
                layers.append(build_block(channels, width))
                channels = layers[-1].out_channels
        self.blocks = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)
        self.project = nn.Linear(channels, embedding_dims)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BC = self.blocks(x_BCHW).mean(dim=(2, 3))
        x_BD = self.project(self.dropout(x_BC))
        return functional.normalize(x_BD.float(), dim=1)


class MinutiaBranch(nn.Module):
    """Computes a unit-norm embedding (B, D) from the output of `stem`, as the minutia maps are.

    The stem has six blocks A. The convolutions after it have biases and nothing between them, as in the reference.
    """

    def __init__(self, channels: int, embedding_dims: int, width: float, dropout: float) -> None:
        super().__init__()
        blocks: list[Concat] = []
        for _ in range(6):
            blocks.append(build_inception_a(channels, width))
            channels = blocks[-1].out_channels
        self.stem = nn.Sequential(*blocks)
        self.stem_channels = channels
        layers = []
        for c, stride in ((768, 1), (768, 2), (896, 1), (1024, 2)):
            layers.append(nn.Conv2d(channels, scale_channels(c, width), 3, stride, padding=1))
            channels = layers[-1].out_channels
        self.embed = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)
        self.project = nn.Linear(channels, embedding_dims)

    def forward(self, minutia_BCHW: Tensor) -> Tensor:
        x_BC = self.embed(minutia_BCHW).amax(dim=(2, 3))
        return functional.normalize(self.project(self.dropout(x_BC)).float(), dim=1)


class MinutiaMapHead(nn.Module):
    """Maps the output of the minutia branch's stem to minutia maps: h x w cells to 6 x (4 h - 12) x (4 w - 12).

    That is 384 x 35 x 35 to 6 x 128 x 128 for 299 pixels. No activations, as in the reference.
    """

    def __init__(self, channels: int, width: float) -> None:
        super().__init__()
        c32, c128 = (scale_channels(c, width) for c in (32, 128))
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(channels, c128, 3, stride=2),
            nn.Conv2d(c128, c128, 7),
            nn.ConvTranspose2d(c128, c32, 3, stride=2),
            nn.Conv2d(c32, MAP_CHANNELS, 3),
        )

    def forward(self, minutia_BCHW: Tensor) -> Tensor:
        maps_B6HW: Tensor = self.layers(minutia_BCHW)[..., :-1, :-1]
        return maps_B6HW


class Aligner(nn.Module):
    """Spatial transformer (Jaderberg et al. 2015, arXiv:1506.02025): rotates and shifts an image, never scales it.

    311,555 parameters for gray images. The last layer starts at zero, so an untrained aligner is the identity up to
    the rounding of 32-bit coordinates, 1e-4 of the image's range. As in DeepPrint, tanh bounds rotation and shift;
    without bounds one bad step moves the print out of the image, where no gradient brings it back.

    Args:
        channels: of the image.
        rotate_deg: largest rotation, in both directions.
        shift: largest shift along each axis, as a share of the image.
    """

    INPUT_PX = 128  # side of the resized image that the network reads

    def __init__(self, channels: int, *, rotate_deg: float = 60.0, shift: float = 0.2) -> None:
        super().__init__()
        self.rotate_rad = math.radians(rotate_deg)
        self.shift = shift
        layers: list[nn.Module] = []
        for c_in, c_out, kernel in ((channels, 24, 5), (24, 32, 3), (32, 48, 3), (48, 64, 3)):
            layers += [nn.Conv2d(c_in, c_out, kernel, padding=kernel // 2), nn.MaxPool2d(2), nn.ReLU()]
        cells = (self.INPUT_PX // 16) ** 2
        self.locate = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * cells, 64), nn.ReLU())
        self.pose = nn.Linear(64, 3)
        nn.init.zeros_(self.pose.weight)
        nn.init.zeros_(self.pose.bias)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Return the aligned images, same shape."""
        return self.align(image_BCHW, self.find_pose(image_BCHW))

    def find_pose(self, image_BCHW: Tensor) -> Tensor:
        """Return (B, 2, 3) float32, which maps coordinates of the aligned image to the image: see `affine_grid`."""
        resized = functional.interpolate(image_BCHW, size=(self.INPUT_PX, self.INPUT_PX), mode="bilinear")
        features_BF = self.locate(resized)
        # 16-bit coordinates would be off by half a pixel at the far side of a 299-pixel image.
        with torch.autocast(image_BCHW.device.type, enabled=False):
            pose_B3 = torch.tanh(self.pose(features_BF.float()))
            return build_rigid_matrix(pose_B3[:, 0] * self.rotate_rad, pose_B3[:, 1:] * 2 * self.shift)

    def align(self, image_BCHW: Tensor, pose_B23: Tensor) -> Tensor:
        """Return the images in these poses, with the border repeated outside."""
        with torch.autocast(image_BCHW.device.type, enabled=False):
            grid_BHW2 = functional.affine_grid(pose_B23, list(image_BCHW.shape), align_corners=False)
            return sample_bilinear(image_BCHW.float(), grid_BHW2)


def build_rigid_matrix(angle_B: Tensor, shift_B2: Tensor) -> Tensor:
    """Return (B, 2, 3) matrices for `affine_grid`: a rotation in radians, then a shift (x, y) in half image sides."""
    cos_B, sin_B = torch.cos(angle_B), torch.sin(angle_B)
    row_x = torch.stack([cos_B, -sin_B, shift_B2[:, 0]], dim=1)
    row_y = torch.stack([sin_B, cos_B, shift_B2[:, 1]], dim=1)
    return torch.stack([row_x, row_y], dim=1)


def sample_bilinear(image_BCHW: Tensor, grid_BHW2: Tensor) -> Tensor:
    """Sample an image at the points of a grid, with its border repeated outside.

    `grid_sample` has no deterministic backward pass on CUDA, because it scatters into the image's gradient. Gathering
    four neighbours gives the grid its gradient without a scatter, and an image that needs one gets it from `gather`,
    whose backward pass is deterministic if torch's algorithms have to be.

    Args:
        grid_BHW2: (x, y) from -1 to 1 between the outer edges of the image (`align_corners=False`).
    """
    batch, channels, height, width = image_BCHW.shape
    x = ((grid_BHW2[..., 0] + 1) * width - 1) / 2
    y = ((grid_BHW2[..., 1] + 1) * height - 1) / 2
    x, y = x.clamp(0, width - 1), y.clamp(0, height - 1)
    left, top = x.detach().floor(), y.detach().floor()
    along_x, along_y = (x - left).unsqueeze(1), (y - top).unsqueeze(1)
    flat_BCP = image_BCHW.flatten(2)

    def gather_corner(row: Tensor, column: Tensor) -> Tensor:
        index_BP = (row.long() * width + column.long()).flatten(1)
        values = flat_BCP.gather(2, index_BP.unsqueeze(1).expand(-1, channels, -1))
        return values.view(batch, channels, *row.shape[1:])

    right, bottom = (left + 1).clamp(max=width - 1), (top + 1).clamp(max=height - 1)
    upper = gather_corner(top, left) * (1 - along_x) + gather_corner(top, right) * along_x
    lower = gather_corner(bottom, left) * (1 - along_x) + gather_corner(bottom, right) * along_x
    return upper * (1 - along_y) + lower * along_y


def scale_channels(channels: int, width: float) -> int:
    """Return a channel count times `width`, rounded to a multiple of 8 for tensor cores, at least 8."""
    return max(8, round(channels * width / 8) * 8)


class Conv(nn.Sequential):
    """Convolution without bias, batch normalisation, ReLU; `valid` (V in the paper's figures) means no padding."""

    def __init__(
        self, c_in: int, c_out: int, kernel: int | tuple[int, int], *, stride: int = 1, valid: bool = False
    ) -> None:
        size = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (0, 0) if valid else (size[0] // 2, size[1] // 2)
        super().__init__(
            nn.Conv2d(c_in, c_out, size, stride, padding, bias=False),
            nn.BatchNorm2d(c_out, eps=1e-3, momentum=0.1),
            nn.ReLU(inplace=True),
        )
        self.out_channels = c_out


class Concat(nn.Module):
    """Parallel branches over one map of `c_in` channels, concatenated along the channels."""

    def __init__(self, c_in: int, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)
        last = [branch[-1] if type(branch) is nn.Sequential else branch for branch in branches]
        self.out_channels = sum(getattr(layer, "out_channels", c_in) for layer in last)  # pooling keeps c_in

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return torch.cat([branch(x_BCHW) for branch in self.branches], dim=1)


def build_inception_a(c_in: int, width: float) -> Concat:
    """Figure 4: 384 channels to 384."""
    c64, c96 = (scale_channels(c, width) for c in (64, 96))
    return Concat(
        c_in,
        Conv(c_in, c96, 1),
        nn.Sequential(Conv(c_in, c64, 1), Conv(c64, c96, 3)),
        nn.Sequential(Conv(c_in, c64, 1), Conv(c64, c96, 3), Conv(c96, c96, 3)),
        nn.Sequential(_build_average_pool(), Conv(c_in, c96, 1)),
    )


def build_reduction_a(c_in: int, width: float) -> Concat:
    """Figure 7 with k, l, m, n = 192, 224, 256, 384: 384 channels to 1024, half the size."""
    c192, c224, c256, c384 = (scale_channels(c, width) for c in (192, 224, 256, 384))
    return Concat(
        c_in,
        Conv(c_in, c384, 3, stride=2, valid=True),
        nn.Sequential(Conv(c_in, c192, 1), Conv(c192, c224, 3), Conv(c224, c256, 3, stride=2, valid=True)),
        nn.MaxPool2d(3, 2),
    )


def build_inception_b(c_in: int, width: float) -> Concat:
    """Figure 5: 1024 channels to 1024."""
    c128, c192, c224, c256, c384 = (scale_channels(c, width) for c in (128, 192, 224, 256, 384))
    return Concat(
        c_in,
        Conv(c_in, c384, 1),
        nn.Sequential(Conv(c_in, c192, 1), Conv(c192, c224, (1, 7)), Conv(c224, c256, (7, 1))),
        nn.Sequential(
            Conv(c_in, c192, 1),
            Conv(c192, c192, (7, 1)),
            Conv(c192, c224, (1, 7)),
            Conv(c224, c224, (7, 1)),
            Conv(c224, c256, (1, 7)),
        ),
        nn.Sequential(_build_average_pool(), Conv(c_in, c128, 1)),
    )


def build_reduction_b(c_in: int, width: float) -> Concat:
    """Figure 8: 1024 channels to 1536, half the size."""
    c192, c256, c320 = (scale_channels(c, width) for c in (192, 256, 320))
    return Concat(
        c_in,
        nn.Sequential(Conv(c_in, c192, 1), Conv(c192, c192, 3, stride=2, valid=True)),
        nn.Sequential(
            Conv(c_in, c256, 1),
            Conv(c256, c256, (1, 7)),
            Conv(c256, c320, (7, 1)),
            Conv(c320, c320, 3, stride=2, valid=True),
        ),
        nn.MaxPool2d(3, 2),
    )


def build_inception_c(c_in: int, width: float) -> Concat:
    """Figure 6: 1536 channels to 1536."""
    c256, c384, c448, c512 = (scale_channels(c, width) for c in (256, 384, 448, 512))

    def build_split(c: int) -> Concat:
        return Concat(c, Conv(c, c256, (1, 3)), Conv(c, c256, (3, 1)))

    return Concat(
        c_in,
        Conv(c_in, c256, 1),
        nn.Sequential(Conv(c_in, c384, 1), build_split(c384)),
        nn.Sequential(Conv(c_in, c384, 1), Conv(c384, c448, (3, 1)), Conv(c448, c512, (1, 3)), build_split(c512)),
        nn.Sequential(_build_average_pool(), Conv(c_in, c256, 1)),
    )


def _build_average_pool() -> nn.AvgPool2d:
    return nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
