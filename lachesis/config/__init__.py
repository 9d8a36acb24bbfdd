"""Define what a user can say: a launch, its fields, profiles, prices, the owner's policy."""
