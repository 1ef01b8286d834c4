// Package sql holds everything of Weir that runs in the database, as files.
//
//	schema/     numbered migrations, each run once
//	functions/  functions, replaced as a whole with each version
//	views/      views, the same, after the functions
//	check/      invariants, one a file: a query that gives no rows while it holds
//	ops/        read-only queries for operators
//	client/     the statements that the library sends
//
// The files are written for the schema "weir". Text puts another name in its place.
package sql

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"
)

//go:embed schema functions views check ops client
var files embed.FS

// DefaultSchema is the schema the files are written for.
const DefaultSchema = "weir"

var (
	schemaName = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,39}$`)
	schemaUse  = regexp.MustCompile(`\bweir\.|\bschema weir\b`)
)

// CheckSchema returns an error unless name can be the name of an install: 1 to 40 lower-case letters, digits and
// underscores that do not begin with a digit, nor with "pg_".
func CheckSchema(name string) error {
	if !schemaName.MatchString(name) || strings.HasPrefix(name, "pg_") {
		return fmt.Errorf("schema %q: use 1 to 40 lower-case letters, digits and underscores, not beginning with a digit or pg_", name)
	}
	return nil
}

// Text returns the file's text for the given schema. The file must exist and the schema's name be a valid one.
func Text(schema, file string) string {
	b, err := files.ReadFile(file)
	if err != nil {
		panic(fmt.Sprintf("weir: no file %s", file))
	}
	if schema == DefaultSchema {
		return string(b)
	}
	return schemaUse.ReplaceAllStringFunc(string(b), func(use string) string {
		return strings.Replace(use, DefaultSchema, `"`+schema+`"`, 1)
	})
}

// List returns the names of the files in a folder, in order.
func List(folder string) []string {
	entries, err := fs.ReadDir(files, folder)
	if err != nil {
		panic(fmt.Sprintf("weir: no folder %s", folder))
	}
	var names []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".sql") {
			names = append(names, path.Join(folder, e.Name()))
		}
	}
	slices.Sort(names)
	return names
}

// Replaced lists the files that are run anew with each version, in order.
func Replaced() []string { return append(List("functions"), List("views")...) }

// ReplacedSum is a checksum of them.
func ReplacedSum() string {
	h := sha256.New()
	for _, f := range Replaced() {
		b, err := files.ReadFile(f)
		if err != nil {
			panic(err)
		}
		h.Write(b)
	}
	return hex.EncodeToString(h.Sum(nil)[:8])
}

// Purpose returns the first sentence of a file's header comment.
func Purpose(file string) string {
	b, err := files.ReadFile(file)
	if err != nil {
		panic(fmt.Sprintf("weir: no file %s", file))
	}
	var words []string
	for line := range strings.Lines(string(b)) {
		text, found := strings.CutPrefix(line, "--")
		if !found || strings.TrimSpace(text) == "" {
			break
		}
		words = append(words, strings.TrimSpace(text))
	}
	return strings.Join(words, " ")
}
