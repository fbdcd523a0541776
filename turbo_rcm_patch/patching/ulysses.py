def ulysses_of(p):
    return None


def attend_over_ranks(*a):
    raise NotImplementedError


def agree_on_largest(block, numbers):
    return numbers


def check_parallel(model, config):
    pass
