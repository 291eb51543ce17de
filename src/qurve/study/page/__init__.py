"""The report's page: one HTML file with everything in it, readable without its script, living with it.

`sections.py` lists what stands in it, `plots.py` has the living figures as data, `page.js` brings them to life with
Plotly's library, which is put in once from the installed package.
"""
