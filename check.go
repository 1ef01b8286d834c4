package weir

import (
	"context"
	"fmt"
	"path"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/weirhq/weir/sql"
)

// CheckResult is the outcome of one invariant.
type CheckResult struct {
	// Name is that of the file in sql/check, Holds what it demands.
	Name  string `json:"check"`
	Holds string `json:"holds"`
	// Violations has a line for each row that the invariant's query gave, at most 100. None: it holds.
	Violations []string `json:"violations"`
}

// Check runs every invariant of sql/check against the database, in one snapshot. It only reads, but needs the privileges of
// the role that installed Weir.
func (c *Client) Check(ctx context.Context) ([]CheckResult, error) {
	if err := c.ready(ctx, nil); err != nil {
		return nil, err
	}
	var results []CheckResult
	err := pgx.BeginTxFunc(ctx, c.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		// The queries run with the owner's rights. An operator of somebody else's in schema public that fits better than the one of
		// pg_catalog would, too.
		if _, err := tx.Exec(ctx, "set local search_path = pg_catalog, pg_temp"); err != nil {
			return err
		}
		for _, file := range sql.List("check") {
			r := CheckResult{Name: strings.TrimSuffix(path.Base(file), ".sql"), Holds: sql.Purpose(file), Violations: []string{}}
			rows, err := tx.Query(ctx, sql.Text(c.schema, file))
			if err != nil {
				return fmt.Errorf("check %s: %w", r.Name, err)
			}
			for rows.Next() && len(r.Violations) < 100 {
				values, err := rows.Values()
				if err != nil {
					return fmt.Errorf("check %s: %w", r.Name, err)
				}
				var parts []string
				for i, f := range rows.FieldDescriptions() {
					parts = append(parts, fmt.Sprintf("%s=%v", f.Name, values[i]))
				}
				r.Violations = append(r.Violations, strings.Join(parts, " "))
			}
			rows.Close()
			if err := rows.Err(); err != nil {
				return fmt.Errorf("check %s: %w", r.Name, err)
			}
			results = append(results, r)
		}
		return nil
	})
	return results, explain(err)
}
