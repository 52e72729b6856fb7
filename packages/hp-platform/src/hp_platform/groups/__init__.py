"""Process groups that stay distinct, made in one order by the ranks that belong to them."""
