"""The page about an audit."""
