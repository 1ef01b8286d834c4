package weir

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// The errors that callers tell apart, with errors.Is. The text of the error itself names the object and the remedy.
var (
	// ErrTopicNotFound: there is no topic of that name. Not worth a retry; create it with CreateTopic.
	ErrTopicNotFound = errors.New("topic not found")
	// ErrGroupNotFound: there is no group of that name on the topic. Not worth a retry; create it with CreateGroup.
	ErrGroupNotFound = errors.New("group not found")
	// ErrInvalid: an argument or option is out of its range. Nothing was changed. Correct it.
	ErrInvalid = errors.New("invalid argument")
	// ErrConflict: a topic or group of that name exists with another format or mode.
	ErrConflict = errors.New("exists with other options")
	// ErrFormat: the message does not fit the topic's format: not JSON, not valid text, or bytes for a JSON topic. Nothing
	// of the call was stored.
	ErrFormat = errors.New("payload does not fit the topic's format")
	// ErrUnknownOutcome: the connection was lost, or the context ended, while messages were being stored, and whether they are
	// could not be found out. Produced again, they may be stored twice, unless they have an IdempotencyKey.
	ErrUnknownOutcome = errors.New("outcome unknown")
	// ErrStandby: the server is a standby. Connect to the primary.
	ErrStandby = errors.New("server is a standby")
	// ErrSequence: a topic's sequence was altered or set back. No message is handed out until an operator has repaired it;
	// the error's hint has the statement.
	ErrSequence = errors.New("sequence is not in order")
	// ErrLeaseLost: the lease expired and was taken over, or its group was moved. The messages are handed out again.
	ErrLeaseLost = errors.New("lease lost")
	// ErrNoMessage: the lease, group or topic has no message of that id.
	ErrNoMessage = errors.New("no such message")
	// ErrSchemaMissing: Weir is not installed in this database, or under another schema name. Run "weir migrate" or
	// Client.Migrate, or correct Options.Schema.
	ErrSchemaMissing = errors.New("weir is not installed")
	// ErrSchemaOld: the installed schema is older than this library. Run "weir migrate" or Client.Migrate.
	ErrSchemaOld = errors.New("installed schema is too old")
	// ErrSchemaNew: the installed schema is newer than this library can work with. Upgrade the program.
	ErrSchemaNew = errors.New("installed schema is too new")
	// ErrHandlerTimeout: the cause of a handler's cancelled context when it has used up ConsumerOptions.HandlerTimeout. The
	// message is retried.
	ErrHandlerTimeout = errors.New("handler exceeded its time limit")
	// ErrStopped: the cause of a handler's cancelled context when its consumer stops and StopTimeout has passed. The message
	// is released to other consumers; the attempt does not count.
	ErrStopped = errors.New("consumer stopped")
	// ErrInUse: a group is not paused, or a consumer holds a lease of it. Pause it, wait until nothing is held, then try again.
	ErrInUse = errors.New("in use")
	// ErrServer: the server is older than PostgreSQL 14.
	ErrServer = errors.New("server is too old")
)

var sentinels = map[string]error{
	"WE001": ErrTopicNotFound,
	"WE002": ErrGroupNotFound,
	"WE003": ErrInvalid,
	"WE004": ErrConflict,
	"WE005": ErrFormat,
	"WE006": ErrStandby,
	"WE007": ErrSequence,
	"WE008": ErrSequence,
	"WE010": ErrLeaseLost,
	"WE011": ErrNoMessage,
	"WE012": ErrInUse,
	"25006": ErrStandby, // COPY during recovery
	"22P02": ErrFormat,  // not JSON
	"22P05": ErrFormat,  // \u0000 in jsonb
	"22021": ErrFormat,  // invalid in the database's encoding
	"22003": ErrFormat,  // a number that jsonb cannot hold
	"23502": ErrInvalid, // no key in a compacted topic, no payload in another
	"22023": ErrFormat,  // headers that are no object, and the like
}

// serverError is an error of the server that one of the sentinels stands for.
type serverError struct {
	sentinel error
	pg       *pgconn.PgError
}

func (e *serverError) Error() string {
	text := e.pg.Message
	for _, more := range []string{e.pg.Detail, e.pg.Hint} {
		if more != "" {
			text = strings.TrimSuffix(text, ".") + ". " + more
		}
	}
	return strings.TrimSuffix(text, ".") + " (" + e.pg.Code + ")"
}

func (e *serverError) Unwrap() []error { return []error{e.sentinel, e.pg} }

// explain gives an error of the server its sentinel.
func explain(err error) error {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return err
	}
	if s := sentinels[pg.Code]; s != nil {
		return &serverError{sentinel: s, pg: pg}
	}
	switch pg.Code {
	case "3F000", "42P01", "42883": // no such schema, table, function
		return fmt.Errorf("%w: %w", ErrSchemaMissing, err)
	}
	return err
}

// transient reports whether an error is not the message's fault, nor the program's: the statement can be sent again.
func transient(err error) bool {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		switch pg.Code {
		case "40001", "40P01", "55P03", "57P01", "57P02", "57P03", "57P05", "53300":
			return true
		}
		return strings.HasPrefix(pg.Code, "08")
	}
	var connect *pgconn.ConnectError
	return errors.As(err, &connect) || pgconn.SafeToRetry(err) || pgconn.Timeout(err)
}

func invalid(field string, value any, rule string) error {
	return fmt.Errorf("%w: %s is %v, %s", ErrInvalid, field, value, rule)
}
