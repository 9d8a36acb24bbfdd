"""The items of the ladder."""


def ladders():
    return [{"start": letter * 2} for letter in "abcdef"]
