"""The web application: pages and routes that show runs, and the JavaScript that draws them."""
