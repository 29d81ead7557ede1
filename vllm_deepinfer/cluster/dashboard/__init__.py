"""A Grafana dashboard for the application's metrics: panels as data, and the JSON that Grafana imports."""
