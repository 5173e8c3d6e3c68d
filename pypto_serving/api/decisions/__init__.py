"""OpenAI's Decisions API: questions about an input, answered with the probabilities of the labels of their options.

A question and its labels become a prompt, and a LabelTree says at which tokens the model's log-probabilities are read.
Nothing is generated beyond the token at which they are read.
"""
