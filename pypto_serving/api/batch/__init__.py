"""Answer the requests of a file, one line of JSON each.

- `endpoints`, `batches`: the endpoints; run the batches of a server
- `store`: keep files and batches in a folder
- `schemas`, `multipart`: describe bodies and answers; read forms
- `running`: answer all requests of a file that are not answered yet, by the endpoints in this process
- `lines`: read requests, write answers
"""
