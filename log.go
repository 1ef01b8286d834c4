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
	logAction   = "action"
	logDetail   = "detail"
	// of a transaction that others wait for
	logPID         = "pid"
	logGID         = "gid"
	logAge         = "age"
	logState       = "state"
	logApplication = "application"
	logQuery       = "query"
)
