"""Norms over the last dimension (section 6)."""

from kcdsl_backends.drift.ops.norms.affine import affine_layer_norm, affine_rms_norm
from kcdsl_backends.drift.ops.norms.interval import interval_layer_norm, interval_rms_norm
from kcdsl_backends.drift.ops.norms.linear import linear_norm
from kcdsl_backends.drift.ops.operation import Operation

OPERATIONS = {
    "rms_norm": Operation(interval_rms_norm, affine_rms_norm, linear_norm(centred=False), (0,)),
    "layer_norm": Operation(
        interval_layer_norm, affine_layer_norm, linear_norm(centred=True), (0,)
    ),
}
