"""Grafana dashboards as code: what each panel asks and says is in ``panels``; ``build`` makes the JSON beside it.

make dashboards        # writes dashboards/*.json; without changes here, without changes there
"""
