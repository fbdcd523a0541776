"""The functions, under the name of the module that defines them in sageattention."""

from turbo_rcm_patch.engines.standing_in import FUNCTIONS

globals().update(FUNCTIONS)
