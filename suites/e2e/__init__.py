"""The end-to-end suite: calibrate, prune, decode and judge, every arm under the same conditions."""
