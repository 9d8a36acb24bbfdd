def bonus(said):
    return 0.1 * (len(set(said)) > 1)
