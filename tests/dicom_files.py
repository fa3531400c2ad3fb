"""DICOM files as scanners write them: pixels, a transfer syntax, a header full of what nobody may learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np

SECRETS = {
    "PatientName": "Quisenberry^Thaddeus",
    "PatientID": "KX-90417734",
    "PatientBirthDate": "19530917",
    "PatientAddress": "Wolkenkuckucksweg 12",
    "InstitutionName": "Sankt Vexillum Klinik",
    "ReferringPhysicianName": "Obermoser^Hildegunde",
    "AccessionNumber": "ACC5527719",
    "StudyDescription": "Thorax nach Sturz",
    "DeviceSerialNumber": "SN-1138-QQ7",
    "StudyDate": "20240229",
}
SYNTAXES = (
    "ImplicitVRLittleEndian",
    "ExplicitVRLittleEndian",
    "ExplicitVRBigEndian",
    "DeflatedExplicitVRLittleEndian",
    "RLELossless",
    "JPEG2000Lossless",
    "JPEGLosslessSV1",
)


def write_dicom(
    path: Path, pixels: np.ndarray, *, syntax: str = "ExplicitVRLittleEndian", **elements: object
) -> Path:
    """One file with ``pixels`` (H, W), (frames, H, W) or (H, W, 3); ``elements`` of the header as given."""
    from pydicom import uid
    from pydicom.dataset import Dataset, FileMetaDataset

    wanted = getattr(uid, syntax)
    plain = wanted if not wanted.is_encapsulated else uid.ExplicitVRLittleEndian
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = plain
    dataset.SOPClassUID = dataset.file_meta.MediaStorageSOPClassUID = (
        uid.DigitalXRayImageStorageForPresentation
    )
    dataset.SOPInstanceUID = dataset.file_meta.MediaStorageSOPInstanceUID = uid.generate_uid()
    colour = pixels.ndim == 3 and pixels.shape[-1] == 3
    dataset.Rows, dataset.Columns = pixels.shape[:2] if colour else pixels.shape[-2:]
    if pixels.ndim == 3 and not colour:
        dataset.NumberOfFrames = len(pixels)
    dataset.SamplesPerPixel = 3 if colour else 1
    dataset.PhotometricInterpretation = "RGB" if colour else "MONOCHROME2"
    if colour:
        dataset.PlanarConfiguration = 0
    dataset.BitsAllocated = dataset.BitsStored = 8 * pixels.dtype.itemsize
    dataset.PixelRepresentation = int(pixels.dtype.kind == "i")
    for name, value in elements.items():
        setattr(dataset, name, value)
    dataset.HighBit = dataset.BitsStored - 1
    stored = pixels.byteswap() if plain == uid.ExplicitVRBigEndian else pixels
    dataset.PixelData = stored.tobytes() + b"\0" * (stored.nbytes % 2)
    dataset["PixelData"].VR = "OB" if pixels.dtype.itemsize == 1 else "OW"
    if wanted.is_encapsulated and syntax != "JPEGLosslessSV1":
        dataset.compress(wanted)
    dataset.save_as(path, enforce_file_format=True)
    if syntax == "JPEGLosslessSV1":  # which pydicom reads and does not write
        _rewrite_as_jpeg_lossless(path)
    return path


def _rewrite_as_jpeg_lossless(path: Path) -> None:
    import gdcm

    reader, change, writer = gdcm.ImageReader(), gdcm.ImageChangeTransferSyntax(), gdcm.ImageWriter()
    reader.SetFileName(str(path))
    assert reader.Read()
    change.SetTransferSyntax(gdcm.TransferSyntax(gdcm.TransferSyntax.JPEGLosslessProcess14_1))
    change.SetInput(reader.GetImage())
    assert change.Change()
    writer.SetFileName(str(path))
    writer.SetFile(reader.GetFile())
    writer.SetImage(change.GetOutput())
    assert writer.Write()
