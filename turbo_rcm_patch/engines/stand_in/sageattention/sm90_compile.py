"""What SGLang imports on Hopper, to tell a repaired sageattention from one that returns noise."""


def qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf_fake_impl(*_: object) -> None:
    """Refuse a call: the kernels of sageattention are not here."""
    raise NotImplementedError("turbo_rcm_patch stands in for sageattention; call sageattn")
