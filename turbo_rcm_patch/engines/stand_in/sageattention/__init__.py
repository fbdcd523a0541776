"""`sageattention` as turbo_rcm_patch computes it: `turbo-rcm-patch as-sageattention -- COMMAND`.

The folder that holds this package is put on the path of Python. It is no part of sageattention and
has none of its kernels.
"""

try:
    from turbo_rcm_patch.engines.standing_in import FUNCTIONS
except ImportError as error:
    # Not an ImportError: programs take one for a missing sageattention, and run another attention.
    raise RuntimeError(
        f"as-sageattention: this Python cannot import turbo_rcm_patch; install it there: {error}"
    ) from error

globals().update(FUNCTIONS)
__all__ = list(FUNCTIONS)  # noqa: PLE0605
