"""Parameters and multiply-adds of every model of the zoo, so that listing them needs no counting.

At the variant's own input size and number of classes, three input channels; multiply-adds are those of
convolutions and linear layers for one image. A test counts them anew.
"""

from __future__ import annotations

# name: (parameters, multiply-adds)
SIZES = {
    "densenet121": (6_964_106, 2_833_147_904),
    "efficientnet_b0": (4_020_358, 384_547_552),
    "efficientnet_lite0": (4_652_008, 385_187_552),
    "efficientnet_lite1": (5_416_680, 600_185_232),
    "efficientnet_lite2": (6_092_072, 859_736_272),
    "lenet": (62_006, 651_720),
    "nf_resnet101": (44_549_193, 7_801_405_440),
    "nf_resnet152": (60_192_858, 11_513_626_624),
    "nf_resnet200": (64_673_898, 15_007_481_856),
    "nf_resnet50": (25_557_048, 4_089_184_256),
    "nfnet_f0": (71_489_284, 6_977_003_520),
    "nfnet_f1": (132_634_256, 17_437_921_280),
    "nfnet_f2": (193_779_228, 33_139_318_784),
    "nfnet_f3": (254_924_200, 67_944_292_352),
    "resnet101": (42_520_650, 7_799_377_920),
    "resnet152": (58_164_298, 11_511_599_104),
    "resnet18": (11_181_642, 1_813_566_464),
    "resnet34": (21_289_802, 3_663_254_528),
    "resnet50": (23_528_522, 4_087_156_736),
    "resnet9": (2_447_946, 284_895_232),
    "scale_efficientnet_b0": (4_022_406, 384_547_552),
    "scale_nf_resnet101": (44_614_217, 7_801_405_440),
    "scale_nf_resnet152": (60_288_602, 11_513_626_624),
    "scale_nf_resnet200": (64_786_026, 15_007_481_856),
    "scale_nf_resnet50": (25_587_256, 4_089_184_256),
    "scale_nfnet_f0": (71_519_492, 6_977_003_520),
    "scale_nfnet_f1": (132_694_672, 17_437_921_280),
    "scale_nfnet_f2": (193_869_852, 33_139_318_784),
    "scale_nfnet_f3": (255_045_032, 67_944_292_352),
    "scale_resnet101": (42_585_674, 7_799_377_920),
    "scale_resnet152": (58_260_042, 11_511_599_104),
    "scale_resnet18": (11_185_482, 1_813_566_464),
    "scale_resnet34": (21_297_354, 3_663_254_528),
    "scale_resnet50": (23_558_730, 4_087_156_736),
    "scale_resnet9": (2_448_714, 284_895_232),
    "scale_smoothnet_residual": (1_344_778, 317_097_216),
    "scale_wrn_16_4": (2_755_610, 392_612_352),
    "scale_wrn_28_10": (36_509_338, 5_243_328_768),
    "scale_wrn_40_4": (8_966_682, 1_298_582_016),
    "smoothnet": (3_391_853, 1_055_035_648),
    "smoothnet_residual": (1_342_858, 317_097_216),
    "wrn_16_4": (2_753_818, 392_612_352),
    "wrn_28_10": (36_500_378, 5_243_328_768),
    "wrn_40_4": (8_961_306, 1_298_582_016),
}
