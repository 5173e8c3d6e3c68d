"""Answer the requests of a file that has one JSON object per line.

- `endpoints`, `batches`: the endpoints; run the batches of a server
- `store`: keep files and batches in a folder
- `schemas`, `multipart`: describe bodies and answers; read forms
- `running`: read the requests of a file, and answer those that have no answer yet, with the endpoints in this process
"""
