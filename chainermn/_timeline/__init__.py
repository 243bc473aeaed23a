"""The timeline of a job: recording, reading, summary and plot."""
