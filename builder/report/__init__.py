"""Reports on artifacts and on live workers: one content, as a page that works from disk and as text."""
