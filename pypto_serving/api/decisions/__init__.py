"""OpenAI's Decisions API: questions about an input, answered with the probabilities of the labels of their options.

A question and its labels become a prompt. A LabelTree says after which tokens to read the model's log-probabilities;
each read generates a single token.
"""
