"""A folder of NIfTI volumes and a table of targets: brain age, or any other number per person.

Flat (``ROOT/sub-01_T1w.nii.gz``) or BIDS (``ROOT/sub-01/ses-1/anat/sub-01_ses-1_T1w.nii.gz``). Axes are reordered to
RAS (left to right, back to front, bottom to top); nothing is rotated. The prepared volumes are kept in one ``.npy``
file, so that the second start is fast.
"""

from tensor_dropout_lab.data.nifti.loading import load_nifti
from tensor_dropout_lab.data.nifti.reading import ScanReader

__all__ = ["ScanReader", "load_nifti"]
