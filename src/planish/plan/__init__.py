"""Choose: shapes and prices in, one method per peak out, with its reasons."""
