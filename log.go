package weir

// Keys of log records.
const (
	logError    = "error"
	logTopic    = "topic"
	logGroup    = "group"
	logConsumer = "consumer"
	logMessage  = "message_id"
	logLease    = "lease_id"
	logAttempt  = "attempt"
	logCount    = "count"
)
