// Command weir works on a Weir message log from the command line: it installs it, produces to it, reads it, runs programs
// as consumers of it, and looks after dead letters. "weir --help" lists what there is.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/weirhq/weir"
)

// The exit codes.
const (
	exitOK     = 0
	exitFailed = 1
	exitUsage  = 2
)

func main() {
	// With a receiver for SIGPIPE, writing to a pipe that nobody reads gives an error, as any other failed write does; without
	// one it would end the process before a consumer has given back what it holds. Ignoring it would be inherited by programs
	// that are started.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run is the whole program but for the process around it.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	g := newGlobal(stdin, stdout, stderr)
	root := newRoot(g)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err != nil && !g.began && !isUsage(err) {
		err = usage("%w", err) // the command line did not get as far as a command
	}
	if flush := g.out.Flush(); err == nil {
		err = flush
	}
	return g.report(err)
}

// report prints an error and returns the exit code that stands for it.
func (g *global) report(err error) int {
	var output *outputError
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errReported):
		return exitFailed
	case errors.As(err, &output) && errors.Is(err, syscall.EPIPE):
		return exitFailed // whoever read has seen enough
	}
	text := strings.TrimRight(err.Error(), "\n")
	fmt.Fprintf(g.err, "%s %s\n", paint(g.colorErr, red, "weir:"), text)
	if next := remedy(err); next != "" && !strings.Contains(text, next) {
		fmt.Fprintf(g.err, "      %s\n", next)
	}
	if code := explained(err); code != "" {
		fmt.Fprintf(g.err, "      \"weir explain %s\" tells more\n", code)
	}
	if isUsage(err) || errors.Is(err, weir.ErrInvalid) {
		return exitUsage
	}
	return exitFailed
}

// remedy says what to do about an error, where the error itself does not say it in terms of this program.
func remedy(err error) string {
	var (
		connect *pgconn.ConnectError
		u       *usageError
	)
	switch {
	case errors.As(err, &u):
		return u.see
	case errors.Is(err, weir.ErrTopicNotFound):
		return `"weir topic list" shows the topics, "weir topic create" makes one`
	case errors.Is(err, weir.ErrGroupNotFound):
		return `"weir group list" shows the groups, "weir group create" makes one`
	case errors.Is(err, weir.ErrNoMessage):
		return `"weir dead list" shows the dead letters`
	case errors.Is(err, weir.ErrSchemaMissing), errors.Is(err, weir.ErrSchemaOld):
		return `"weir migrate" installs or upgrades Weir; --schema says where`
	case errors.Is(err, weir.ErrConflict):
		return `"weir topic describe" and "weir group describe" show what is there`
	case errors.As(err, &connect):
		return `name the server with --dsn, WEIR_DSN or the PG* variables, or start one with "weir dev"`
	}
	return ""
}

// errReported ends the program with exitFailed when everything has been said already.
var errReported = errors.New("failed")

// usageError is a mistake in the command line.
type usageError struct {
	err error
	see string
}

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usage(format string, args ...any) error {
	return &usageError{err: fmt.Errorf(format, args...), see: `see "weir --help"`}
}

func isUsage(err error) bool {
	var u *usageError
	return errors.As(err, &u)
}

// outputError is a failed write to standard output.
type outputError struct{ err error }

func (e *outputError) Error() string { return "write standard output: " + e.err.Error() }
func (e *outputError) Unwrap() error { return e.err }

// outputWriter marks errors as those of standard output.
type outputWriter struct{ w io.Writer }

func (o outputWriter) Write(p []byte) (int, error) {
	n, err := o.w.Write(p)
	var path *os.PathError
	if errors.As(err, &path) {
		err = path.Err // its name says nothing that the message does not
	}
	if err != nil {
		err = &outputError{err}
	}
	return n, err
}
