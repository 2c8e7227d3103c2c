"""Post-training quantization with ModelOpt: plan, calibrate, export, verify, measure.

`formats` and `stage` import nothing heavy; torch, transformers and ModelOpt load inside `quantize`.
"""

from trtspec.quantize.formats import FORMATS, FormatPlan, check_format
from trtspec.quantize.stage import QuantizeReport, QuantizeRequest, quantize

__all__ = ["FORMATS", "FormatPlan", "QuantizeReport", "QuantizeRequest", "check_format", "quantize"]
