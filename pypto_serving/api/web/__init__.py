"""Serve the pages for browsers: a playground at / and a dashboard at /dashboard.

The pages are the files in `static/`, served unchanged; nothing is built. They load nothing from other sites, and their
content security policy forbids it.

- `pages`: serve the files
- `dashboard`: serve the data of the dashboard
"""
