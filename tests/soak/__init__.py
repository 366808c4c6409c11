"""The whole agent under churn for minutes or hours: `make soak`, and a short run in the tests."""
