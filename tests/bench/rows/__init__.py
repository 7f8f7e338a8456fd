"""What is measured. Each module registers its rows with `row`; importing `all_rows` brings all of them."""
